# What goes into the Python package:
#   gguf_flash/_core.*.so   gguf_flash/lib/*.so   gguf_flash/bin/llama-*   gguf_flash/_upstream/
# Everything carries the install component `gguf_flash`; upstream's own install rules are not run.

set(packaged_libraries gguf_flash_engine ggml-base ggml-cpu ggml llama llama-common)
foreach(tool IN LISTS GGUF_FLASH_TOOLS)
  if(TARGET ${tool}-impl)
    list(APPEND packaged_libraries ${tool}-impl)
  endif()
endforeach()

add_custom_target(gguf_flash_package ALL)
add_dependencies(gguf_flash_package ${packaged_libraries} ${GGUF_FLASH_TOOLS})

if(APPLE)
  set(origin "@loader_path")
else()
  set(origin "$ORIGIN")
endif()

# Where a packaged binary finds the others. On Linux as RPATH, not RUNPATH: an LD_LIBRARY_PATH with
# somebody else's ggml must not win.
function(gguf_flash_run_path target path)
  set_property(TARGET ${target} PROPERTY INSTALL_RPATH "${path}")
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set_property(TARGET ${target} APPEND PROPERTY LINK_OPTIONS LINKER:--disable-new-dtags)
  endif()
endfunction()

# Wheels hold no symbolic links, so libraries carry no version: libllama.so is the file, the SONAME
# and the name llama_cpp opens, and one process never loads two copies.
foreach(library IN LISTS packaged_libraries)
  set_property(TARGET ${library} PROPERTY VERSION)
  set_property(TARGET ${library} PROPERTY SOVERSION)
  set_property(TARGET ${library} PROPERTY PUBLIC_HEADER)
  gguf_flash_run_path(${library} "${origin}")
  install(TARGETS ${library} LIBRARY DESTINATION gguf_flash/lib COMPONENT gguf_flash)
endforeach()

foreach(tool IN LISTS GGUF_FLASH_TOOLS)
  gguf_flash_run_path(${tool} "${origin}/../lib")
  install(TARGETS ${tool} RUNTIME DESTINATION gguf_flash/bin COMPONENT gguf_flash)
endforeach()

if(TARGET _core)
  gguf_flash_run_path(_core "${origin}/lib")
  install(TARGETS _core LIBRARY DESTINATION gguf_flash COMPONENT gguf_flash)
endif()

# Upstream's pure Python: llama_cpp for users who have none of their own, and the HF converter with
# the gguf package it was written for. Each stands alone in its folder, so that putting one on
# sys.path never shadows another package. A plain llama.cpp tree as the source has no llama_cpp.
set(upstream gguf_flash/_upstream)
install(FILES "${CMAKE_SOURCE_DIR}/LLAMA_CPP_PIN" DESTINATION ${upstream} COMPONENT gguf_flash)
install(DIRECTORY "${CMAKE_BINARY_DIR}/source/python/" DESTINATION ${upstream}/python
  COMPONENT gguf_flash OPTIONAL PATTERN __pycache__ EXCLUDE)
install(FILES "${llama_dir}/convert_hf_to_gguf.py" "${llama_dir}/LICENSE"
  DESTINATION ${upstream} COMPONENT gguf_flash)
install(DIRECTORY "${llama_dir}/conversion" "${llama_dir}/licenses" DESTINATION ${upstream}
  COMPONENT gguf_flash PATTERN __pycache__ EXCLUDE)
install(DIRECTORY "${llama_dir}/gguf-py/gguf" DESTINATION ${upstream}/gguf-py
  COMPONENT gguf_flash PATTERN __pycache__ EXCLUDE)
install(FILES "${llama_dir}/gguf-py/LICENSE" DESTINATION ${upstream}/gguf-py COMPONENT gguf_flash)
