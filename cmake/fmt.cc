// fmt's own code, compiled once. Header-only, each of our files would compile all of it again: four seconds a file
// instead of a third of one. The distribution's libfmt.so would do as well, but then what we ship would need it.
#include <fmt/format-inl.h>

// Templates that fmt's headers declare and leave to its library.
FMT_BEGIN_NAMESPACE
namespace detail {
template auto locale_ref::get<std::locale>() const -> std::locale;
template auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template auto decimal_point_impl<char>(locale_ref) -> char;
template void vformat_to<char>(buffer<char>&, string_view, basic_format_args<FMT_BUFFER_CONTEXT(char)>, locale_ref);
template void buffer<char>::append<char>(const char*, const char*);
}  // namespace detail
FMT_END_NAMESPACE
