# Runs the two scripts that provide the (patched) llama.cpp source, at configure time.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
set(gguf_flash_patches "${CMAKE_CURRENT_LIST_DIR}/../patches")
set(gguf_flash_scripts "${CMAKE_CURRENT_LIST_DIR}")

function(gguf_flash_run_script script)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -B "${gguf_flash_scripts}/${script}" ${ARGN}
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "gguf_flash: ${script} failed; its message above says why and what to do.")
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${gguf_flash_scripts}/${script}" "${gguf_flash_scripts}/build_step.py")
endfunction()

# dest/llama.cpp and dest/python: the pinned source, unpatched.
function(gguf_flash_fetch_source dest)
  gguf_flash_run_script(fetch_source.py "${dest}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${gguf_flash_scripts}/../LLAMA_CPP_PIN")
endfunction()

# Patches the tree in place.
function(gguf_flash_apply_series source)
  gguf_flash_run_script(apply_series.py "${source}" "${gguf_flash_patches}")
  file(GLOB patches CONFIGURE_DEPENDS "${gguf_flash_patches}/*.patch")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${gguf_flash_patches}/series" ${patches})
endfunction()
