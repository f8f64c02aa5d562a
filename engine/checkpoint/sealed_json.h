// JSON documents that show every damage: {"crc32c":"1a2b3c4d","body":{...}}, one line, ended by a newline.
//
// The checksum is the CRC32C of the body's bytes as they stand in the file. A flipped bit anywhere (in the frame, the
// checksum or the body), a short file and a long file are all kDamaged. docs/format.md is normative. Pure; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/error.h"

namespace unbroken {

// The whole document around the text of a JSON object.
std::string seal_json(std::string_view body);
// The text of the body. kDamaged, with `name` in the message, when the document is not exactly what was sealed.
Result<std::string> unseal_json(std::string_view document, std::string_view name);

// Reads typed fields of a parsed document and remembers the first that is missing or of another type. A document comes
// from outside: nothing here throws, whatever it holds.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string_view name) : object_(&object), name_(name) {
    if (!object.is_object()) fail("is not an object");
  }

  std::uint64_t u64(const char* key);
  std::int64_t i64(const char* key);
  std::string text(const char* key);
  // An 8-digit hexadecimal number, as checksums are written.
  std::uint32_t hex32(const char* key);
  // An empty array or object stands for one that is missing; finish() reports it.
  const nlohmann::json& array(const char* key);
  const nlohmann::json& object(const char* key);
  // The JSON text of any value.
  std::string raw(const char* key);

  void fail(std::string_view reason);
  bool failed() const { return !error_.empty(); }
  // kDamaged naming document and field when something was wrong.
  Status finish() const;

 private:
  const nlohmann::json* find(const char* key);

  const nlohmann::json* object_;
  std::string name_;
  std::string error_;
};

// Whether a document can hold this JSON text as it is: kInvalidArgument when it is not JSON, or has a whole number of
// more than 64 bits, which would come back as another number.
Status check_exact_json(std::string_view text, std::string_view name);

// Parses text that must be a JSON object. kDamaged.
Result<nlohmann::json> parse_json_object(std::string_view text, std::string_view name);

}  // namespace unbroken
