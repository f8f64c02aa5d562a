#include "base/deadline.h"

#include <gtest/gtest.h>

namespace unbroken {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(DeadlineTest, OneThatIsNowOrInThePastHasPassedAndLeavesNothing) {
  for (const auto deadline : {Deadline::after(milliseconds(0)), Deadline::after(milliseconds(-5)),
                              Deadline::after_seconds(0), Deadline::after_seconds(-3.5)}) {
    EXPECT_TRUE(deadline.passed());
    EXPECT_EQ(deadline.left(), milliseconds(0));
  }
}

TEST(DeadlineTest, OneAheadHasNotPassedAndLeavesNoMoreThanWasGiven) {
  for (const auto deadline : {Deadline::after(hours(1)), Deadline::after_seconds(3600)}) {
    EXPECT_FALSE(deadline.passed());
    EXPECT_GT(deadline.left(), milliseconds(0));
    EXPECT_LE(deadline.left(), milliseconds(hours(1)));
  }
}

TEST(DeadlineTest, TimeLeftNeverGrows) {
  const auto deadline = Deadline::after(hours(1));
  auto before = deadline.left();
  for (int i = 0; i < 1000; ++i) {
    const auto now = deadline.left();
    ASSERT_LE(now, before);
    before = now;
  }
}

TEST(DeadlineTest, FractionsOfASecondCount) {
  EXPECT_GT(Deadline::after_seconds(1.5e3).left(), Deadline::after_seconds(0.5e3).left());
  EXPECT_FALSE(Deadline::after_seconds(3600.25).passed());
}

}  // namespace
}  // namespace unbroken
