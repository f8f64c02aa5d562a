#include "store/store.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/errors.h"
#include "bindings/handles.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unbroken::bindings {
namespace {

constexpr std::uint64_t kReadLimit = std::uint64_t{1} << 30;

StoreHandle open(const std::string& url, bool create) {
  const nb::gil_scoped_release released;
  return {.store = unwrap(open_store(url, {.create = create}))};
}

nb::bytes read(const StoreHandle& self, const std::string& path, std::uint64_t limit) {
  std::string content;
  {
    const nb::gil_scoped_release released;
    content = unwrap(self.store->read(path, limit));
  }
  return nb::bytes(content.data(), content.size());
}

std::vector<std::string> list(const StoreHandle& self, const std::string& path) {
  const nb::gil_scoped_release released;
  std::vector<std::string> names;
  for (auto& entry : unwrap(self.store->list(path))) names.push_back(std::move(entry.name));
  return names;
}

}  // namespace

void bind_store(nb::module_& module) {
  nb::class_<StoreHandle>(module, "Store",
                          "A place for objects under one root. Thread-safe; blocks for I/O without the GIL.")
      .def_prop_ro(
          "url", [](const StoreHandle& self) { return std::string(self.store->url()); },
          "Where it is, without credentials.")
      .def_prop_ro(
          "create_if_absent", [](const StoreHandle& self) { return self.store->abilities().create_if_absent; },
          "Whether of several callers that create one name exactly one wins.")
      .def("read", &read, "path"_a, "limit"_a = kReadLimit, "The whole object, of at most `limit` bytes.")
      .def("list", &list, "path"_a, "The names in a directory, sorted.");
  module.def("open_store", &open, "url"_a, nb::kw_only(), "create"_a = false,
             "Opens a directory (`/path` or `file:///path`); `create` makes it when it is absent.");
}

}  // namespace unbroken::bindings
