# Included at the end of llama.cpp's src/CMakeLists.txt (patch 0001): adds the hooks and our own
# architectures to libllama.

set(hooks_dir "${CMAKE_CURRENT_LIST_DIR}")
set(models_dir "${hooks_dir}/../models")
file(GLOB hook_sources CONFIGURE_DEPENDS "${hooks_dir}/*.cpp" "${models_dir}/*.cpp")

target_sources(llama PRIVATE ${hook_sources})
# Upstream batches src/models/*.cpp into unity files; ours stay outside, or the batches reshuffle.
set_source_files_properties(${hook_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_include_directories(llama PRIVATE "${hooks_dir}" "${models_dir}")
# By name: the engine's target is added after llama.cpp, because it needs ggml's.
target_link_libraries(llama PRIVATE gguf_flash_engine)
