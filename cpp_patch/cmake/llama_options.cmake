# Options of llama.cpp and ggml, the same for the patched and the stock build, so that tests and
# benchmarks compare nothing but the patch. All of them can be overridden with -D.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(GGUF_FLASH_TOOLS
    llama-bench llama-perplexity llama-completion llama-quantize llama-gguf-split
    CACHE STRING "llama.cpp tools to build and to ship")

set(BUILD_SHARED_LIBS ON CACHE BOOL "Shared libraries: one ggml and one engine per process")
set(GGML_NATIVE ON CACHE BOOL "Optimize ggml for the machine that builds")
set(LLAMA_BUILD_COMMON ON CACHE BOOL "Needed by the tools")
set(LLAMA_BUILD_TOOLS ON CACHE BOOL "Only the targets in GGUF_FLASH_TOOLS are built")
foreach(part TESTS EXAMPLES SERVER APP UI)
  set(LLAMA_BUILD_${part} OFF CACHE BOOL "Not part of gguf_flash")
endforeach()
set(LLAMA_OPENSSL OFF CACHE BOOL "The tools read local files only")
set(LLAMA_TOOLS_INSTALL OFF CACHE BOOL "cmake/package.cmake installs the tools")

# Upstream asks git for the commit. The source tree lies inside whatever repository the user builds
# in, so git would answer with a foreign commit, and every commit there would rebuild ggml.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../LLAMA_CPP_PIN" pin LIMIT_COUNT 1)
string(REGEX REPLACE ".* " "" LLAMA_BUILD_COMMIT "${pin}")
set(LLAMA_BUILD_NUMBER 0)
set(GGML_BUILD_NUMBER ${LLAMA_BUILD_NUMBER})
set(GGML_BUILD_COMMIT ${LLAMA_BUILD_COMMIT})
set(GIT_EXE FALSE CACHE STRING "Keep ggml from asking git" FORCE)
mark_as_advanced(GIT_EXE)

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
