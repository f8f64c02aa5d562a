#include <nanobind/nanobind.h>

#include "bindings/errors.h"

namespace unbroken::bindings {
void bind_board(nanobind::module_& module);
void bind_checkpoint(nanobind::module_& module);
void bind_log(nanobind::module_& module);
void bind_order(nanobind::module_& module);
void bind_store(nanobind::module_& module);
}  // namespace unbroken::bindings

// The binding of an engine part stands in <part>.cc as bind_<part>() and is declared and called here.
NB_MODULE(_engine, module) {
  module.doc() = "The engine of Unbroken, for its Python package; not for users.";
  module.attr("version") = UNBROKEN_VERSION;
  unbroken::bindings::bind_errors(module);
  unbroken::bindings::bind_log(module);
  unbroken::bindings::bind_board(module);
  unbroken::bindings::bind_store(module);
  unbroken::bindings::bind_order(module);
  unbroken::bindings::bind_checkpoint(module);
}
