#include "checkpoint/sealed_json.h"

#include <fmt/core.h>

#include <charconv>

#include "base/bytes.h"
#include "base/crc32c.h"

namespace unbroken {
namespace {

constexpr std::string_view kHead = R"({"crc32c":")";
constexpr std::string_view kMiddle = R"(","body":)";
constexpr std::string_view kTail = "}\n";
constexpr std::size_t kDigits = 8;
constexpr int kDeepest = 64;

bool parse_hex32(std::string_view digits, std::uint32_t& value) {
  if (digits.size() != kDigits) return false;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return error == std::errc() && end == digits.data() + digits.size();
}

// The library prints values recursively: a document that nests without end would overflow the stack.
bool nests_too_deep(std::string_view text) {
  int depth = 0;
  bool in_text = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_text) {
      if (c == '\\') ++i;
      if (c == '"') in_text = false;
    } else if (c == '"') {
      in_text = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kDeepest) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace

std::string seal_json(std::string_view body) {
  return fmt::format("{}{:08x}{}{}{}", kHead, crc32c(bytes_of(body)), kMiddle, body, kTail);
}

Result<std::string> unseal_json(std::string_view document, std::string_view name) {
  const auto damaged = [&](std::string_view how) {
    return make_error(Code::kDamaged, fmt::format("read {}: {}", name, how));
  };
  const std::size_t frame = kHead.size() + kDigits + kMiddle.size();
  if (document.empty()) return damaged("the file is empty");
  if (document.size() < frame + kTail.size()) return damaged("the file is cut short");
  const std::string_view digits = document.substr(kHead.size(), kDigits);
  if (!document.starts_with(kHead) || document.substr(kHead.size() + kDigits, kMiddle.size()) != kMiddle) {
    return damaged("it does not begin as a document of Unbroken does");
  }
  if (!document.ends_with(kTail)) return damaged("the end is missing");
  const std::string_view body = document.substr(frame, document.size() - frame - kTail.size());
  // Written in lower case: an upper-case digit is a flipped bit, too.
  if (digits != fmt::format("{:08x}", crc32c(bytes_of(body)))) return damaged("the checksum does not fit the content");
  return std::string(body);
}

Status check_exact_json(std::string_view text, std::string_view name) {
  struct Check : nlohmann::json_sax<nlohmann::json> {
    bool null() override { return true; }
    bool boolean(bool) override { return true; }
    bool number_integer(number_integer_t) override { return true; }
    bool number_unsigned(number_unsigned_t) override { return true; }
    bool number_float(number_float_t, const string_t& digits) override {
      too_long = digits.find_first_of(".eE") == std::string::npos;
      return !too_long;
    }
    bool string(string_t&) override { return true; }
    bool binary(binary_t&) override { return false; }
    bool start_object(std::size_t) override { return true; }
    bool key(string_t&) override { return true; }
    bool end_object() override { return true; }
    bool start_array(std::size_t) override { return true; }
    bool end_array() override { return true; }
    bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override { return false; }

    bool too_long = false;
  } check;
  if (nlohmann::json::sax_parse(text, &check)) return {};
  return make_error(Code::kInvalidArgument,
                    check.too_long
                        ? fmt::format("{}: it has a whole number of more than 64 bits; give it as a text", name)
                        : fmt::format("{}: it is not JSON", name));
}

const nlohmann::json* JsonFields::find(const char* key) {
  if (!object_->is_object()) return nullptr;
  const auto found = object_->find(key);
  if (found == object_->end()) {
    fail(fmt::format("has no field \"{}\"", key));
    return nullptr;
  }
  return &*found;
}

std::uint64_t JsonFields::u64(const char* key) {
  const auto* value = find(key);
  if (value == nullptr) return 0;
  if (!value->is_number_unsigned()) {
    fail(fmt::format("field \"{}\" is not a whole number", key));
    return 0;
  }
  return value->get<std::uint64_t>();
}

std::int64_t JsonFields::i64(const char* key) {
  const auto* value = find(key);
  if (value == nullptr) return 0;
  if (!value->is_number_integer()) {
    fail(fmt::format("field \"{}\" is not a whole number", key));
    return 0;
  }
  return value->get<std::int64_t>();
}

std::string JsonFields::text(const char* key) {
  const auto* value = find(key);
  if (value == nullptr) return {};
  if (!value->is_string()) {
    fail(fmt::format("field \"{}\" is not a text", key));
    return {};
  }
  return value->get<std::string>();
}

std::uint32_t JsonFields::hex32(const char* key) {
  std::uint32_t value = 0;
  const std::string digits = text(key);
  if (!failed() && !parse_hex32(digits, value)) fail(fmt::format("field \"{}\" is not a checksum", key));
  return value;
}

const nlohmann::json& JsonFields::array(const char* key) {
  static const nlohmann::json kEmpty = nlohmann::json::array();
  const auto* value = find(key);
  if (value == nullptr) return kEmpty;
  if (!value->is_array()) {
    fail(fmt::format("field \"{}\" is not a list", key));
    return kEmpty;
  }
  return *value;
}

const nlohmann::json& JsonFields::object(const char* key) {
  static const nlohmann::json kEmpty = nlohmann::json::object();
  const auto* value = find(key);
  if (value == nullptr) return kEmpty;
  if (!value->is_object()) {
    fail(fmt::format("field \"{}\" is not an object", key));
    return kEmpty;
  }
  return *value;
}

std::string JsonFields::raw(const char* key) {
  const auto* value = find(key);
  return value == nullptr ? "null" : value->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void JsonFields::fail(std::string_view reason) {
  if (error_.empty()) error_ = reason;
}

Status JsonFields::finish() const {
  if (failed()) return make_error(Code::kDamaged, fmt::format("read {}: {}", name_, error_));
  return {};
}

Result<nlohmann::json> parse_json_object(std::string_view text, std::string_view name) {
  if (nests_too_deep(text)) {
    return make_error(Code::kDamaged, fmt::format("read {}: it nests deeper than {} levels", name, kDeepest));
  }
  auto parsed = nlohmann::json::parse(text, nullptr, false);
  if (parsed.is_discarded() || !parsed.is_object()) {
    return make_error(Code::kDamaged, fmt::format("read {}: it is not a JSON object", name));
  }
  return parsed;
}

}  // namespace unbroken
