# How all C++ of the project is compiled: the target unbroken_flags, which every other target links.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")  # enough for backtraces; full debugging is what Debug is for
set(CMAKE_CXX_STANDARD 23)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Paths below the build directory are hashed relative to it, so several build directories share what one compiled.
find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_BASEDIR=${CMAKE_BINARY_DIR} CCACHE_NOHASHDIR=1 ${CCACHE})
endif()

function(unbroken_require package debian_package)
  find_package(${package} QUIET ${ARGN})
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "find ${package}: it is not installed; on Debian: apt-get install ${debian_package}")
  endif()
endfunction()

unbroken_require(Threads libc6-dev)
unbroken_require(fmt libfmt-dev)
unbroken_require(nlohmann_json nlohmann-json3-dev)

# Less optimised, since GCC takes minutes for a file when both ask for all.
if(UNBROKEN_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")
  add_compile_options(-fsanitize=${UNBROKEN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${UNBROKEN_SANITIZE})
endif()

# cmake/fmt.cc knows what Debian's fmt leaves to its library; a later one is used header-only, which is slow but sure.
if(fmt_VERSION VERSION_LESS 10)
  add_library(unbroken_fmt STATIC cmake/fmt.cc)
else()
  add_library(unbroken_fmt INTERFACE)
  target_link_libraries(unbroken_fmt INTERFACE fmt::fmt-header-only)
endif()

add_library(unbroken_flags INTERFACE)
target_compile_options(unbroken_flags INTERFACE -Wall -Wextra -Wconversion $<$<BOOL:${UNBROKEN_WERROR}>:-Werror>)
target_compile_definitions(unbroken_flags INTERFACE UNBROKEN_VERSION="${PROJECT_VERSION}")
target_link_libraries(unbroken_flags INTERFACE Threads::Threads unbroken_fmt nlohmann_json::nlohmann_json)
