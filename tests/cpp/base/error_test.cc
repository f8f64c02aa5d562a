#include "base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <set>
#include <string>

namespace unbroken {
namespace {

TEST(ErrorTest, EveryCodeHasItsOwnName) {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) names.insert(code_name(static_cast<Code>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(Code::kInternal) + 1);
}

TEST(ErrorTest, OnlyUnavailableAndDeadlineAreRetryable) {
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    const Code code = static_cast<Code>(i);
    const Error error = make_error(code, "read x: cause");
    EXPECT_EQ(error.code, code);
    EXPECT_EQ(error.retryable, code == Code::kUnavailable || code == Code::kDeadline) << code_name(code);
    EXPECT_FALSE(error.data_may_be_lost) << code_name(code);
  }
}

TEST(ErrorTest, ContextComesBeforeTheMessageAndKeepsTheRest) {
  Error inner = make_error(Code::kUnavailable, "fsync shard: down");
  inner.data_may_be_lost = true;
  const Error kept = inner.in("save step 400");
  EXPECT_EQ(kept.message, "save step 400: fsync shard: down");
  EXPECT_EQ(kept.code, Code::kUnavailable);
  EXPECT_TRUE(kept.retryable);
  EXPECT_TRUE(kept.data_may_be_lost);
  EXPECT_EQ(inner.message, "fsync shard: down");
  EXPECT_EQ(std::move(inner).in("save").message, "save: fsync shard: down");
}

struct ErrnoCase {
  int number;
  Code code;
  const char* name;
};

class ErrnoTest : public testing::TestWithParam<ErrnoCase> {};

TEST_P(ErrnoTest, NamesActionObjectAndCause) {
  const auto& [number, code, name] = GetParam();
  const Error error = errno_error(number, "open", "runs/7/latest");
  EXPECT_EQ(error.code, code);
  EXPECT_TRUE(error.message.starts_with("open runs/7/latest: ")) << error.message;
  EXPECT_TRUE(error.message.ends_with("(" + std::string(name) + ")")) << error.message;
  EXPECT_EQ(error.retryable, code == Code::kUnavailable);
}

INSTANTIATE_TEST_SUITE_P(
    All, ErrnoTest,
    testing::Values(ErrnoCase{ENOENT, Code::kNotFound, "ENOENT"}, ErrnoCase{EEXIST, Code::kAlreadyExists, "EEXIST"},
                    ErrnoCase{EACCES, Code::kPermission, "EACCES"}, ErrnoCase{EROFS, Code::kPermission, "EROFS"},
                    ErrnoCase{ENOSPC, Code::kNoSpace, "ENOSPC"}, ErrnoCase{EDQUOT, Code::kNoSpace, "EDQUOT"},
                    ErrnoCase{ENOTDIR, Code::kInvalidArgument, "ENOTDIR"},
                    ErrnoCase{EOPNOTSUPP, Code::kUnsupported, "EOPNOTSUPP"},
                    ErrnoCase{ESTALE, Code::kUnavailable, "ESTALE"}, ErrnoCase{EMFILE, Code::kUnavailable, "EMFILE"},
                    ErrnoCase{EIO, Code::kIo, "EIO"}, ErrnoCase{ENODEV, Code::kIo, "ENODEV"}),
    [](const auto& info) { return info.param.name; });

TEST(ErrorTest, AnUnheardOfErrnoIsStillAnError) {
  const Error error = errno_error(9999, "open", "x");
  EXPECT_EQ(error.code, Code::kIo);
  EXPECT_EQ(error.message, "open x: unknown error (?)");
}

Result<std::unique_ptr<int>> box(int value) {
  if (value < 0) return make_error(Code::kInvalidArgument, "box value: negative");
  return std::make_unique<int>(value);
}

Result<int> sum(int a, int b, int* calls) {
  UNBROKEN_ASSIGN(const auto first, box(a));
  ++*calls;
  UNBROKEN_ASSIGN(const auto second, box(b));
  ++*calls;
  return *first + *second;
}

Status chain(Status first, int* calls) {
  UNBROKEN_TRY(std::move(first));
  ++*calls;
  return {};
}

TEST(ResultTest, AssignMovesTheValueOrReturnsTheErrorAtOnce) {
  int calls = 0;
  EXPECT_EQ(sum(2, 3, &calls).value(), 5);
  EXPECT_EQ(calls, 2);
  calls = 0;
  const auto failed = sum(2, -3, &calls);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kInvalidArgument);
  EXPECT_EQ(failed.error().message, "box value: negative");
  EXPECT_EQ(calls, 1);
}

TEST(ResultTest, TryGoesOnAfterSuccessAndReturnsTheErrorAtOnce) {
  int calls = 0;
  EXPECT_TRUE(chain({}, &calls));
  EXPECT_EQ(calls, 1);
  const auto failed = chain(make_error(Code::kFenced, "save: overtaken"), &calls);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kFenced);
  EXPECT_EQ(calls, 1);
}

TEST(AssertionDeathTest, AFalseAssertionAbortsInEveryBuild) {
  UNBROKEN_ASSERT(1 + 1 == 2);
  EXPECT_DEATH(UNBROKEN_ASSERT(1 + 1 == 3), "internal error: 1 \\+ 1 == 3 is false at .*error_test.cc");
}

}  // namespace
}  // namespace unbroken
