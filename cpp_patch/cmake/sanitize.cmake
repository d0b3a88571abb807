# GGUF_FLASH_SANITIZE=address,undefined instruments everything that is built, ggml included.

if(GGUF_FLASH_SANITIZE)
  set(flags -fsanitize=${GGUF_FLASH_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g)
  add_compile_options(${flags})
  add_link_options(-fsanitize=${GGUF_FLASH_SANITIZE})
  # Sanitizers do not see libgomp's synchronisation; ggml's own thread pool they do.
  set(GGML_OPENMP OFF CACHE BOOL "ggml: use OpenMP")
endif()
