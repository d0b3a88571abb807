#include "neuron_thresholds.h"

#include "flash_model.h"

#include "llama-model-loader.h"

#include "ggml-backend.h"
#include "gguf_flash/ffn.h"

#include <fstream>
#include <vector>

namespace {

using weight = llama_model_loader::llama_tensor_weight;

[[noreturn]] void refuse(const std::string & name, const std::string & what) {
    flash_refuse({ gguf_flash::Code::corrupt, "tensor '" + name + "' of the model " + what + "; convert it again" });
}

std::vector<float> read_values(const llama_model_loader & ml, const weight & w) {
    std::vector<float> values(size_t(ggml_nelements(w.tensor)));
    // Not through the loader's own file, which may be open for direct reads of whole sectors.
    std::ifstream file("/proc/self/fd/" + std::to_string(ml.files[w.idx]->file_id()), std::ios::binary);
    file.seekg(std::streamoff(w.offs));
    if (!file.read(reinterpret_cast<char *>(values.data()), std::streamsize(values.size() * sizeof(float)))) {
        flash_refuse(
            { gguf_flash::Code::io, "cannot read tensor '" + std::string(ggml_get_name(w.tensor)) + "' of the model" });
    }
    const gguf_flash::Status status = gguf_flash::check_thresholds("the model", ggml_get_name(w.tensor), values);
    if (!status.ok()) {
        flash_refuse(status);
    }
    return values;
}

void check_shape(const llama_model_loader & ml, const weight & w, unsigned block) {
    const auto down = ml.weights_map.find("blk." + std::to_string(block) + ".ffn_down.weight");
    const int64_t n_ff = down == ml.weights_map.end() ? 0 : down->second.tensor->ne[0];
    if (w.tensor->type != GGML_TYPE_F32 || ggml_n_dims(w.tensor) != 1 || w.tensor->ne[0] != n_ff) {
        refuse(ggml_get_name(w.tensor), "does not hold " + std::to_string(n_ff) + " F32 values, one for each neuron");
    }
}

// Under no_alloc, where only memory is estimated, in a buffer without bytes: the graph has its nodes.
neuron_thresholds make_tensors(const llama_model_loader & ml, const std::map<unsigned, weight> & found) {
    neuron_thresholds out;
    out.ctx.reset(ggml_init({ ggml_tensor_overhead() * found.size(), nullptr, true }));
    for (const auto & [block, w] : found) {
        check_shape(ml, w, block);
        out.of_block[block] = ggml_new_tensor_1d(out.ctx.get(), GGML_TYPE_F32, w.tensor->ne[0]);
    }
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    out.buffer.reset(ml.no_alloc ? ggml_backend_buft_alloc_buffer(type, 0)
                                 : ggml_backend_alloc_ctx_tensors_from_buft(out.ctx.get(), type));
    if (out.buffer == nullptr) {
        flash_refuse({ gguf_flash::Code::ram_too_small, "cannot reserve memory for the neurons' thresholds" });
    }
    ggml_backend_buffer_set_usage(out.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return out;
}

} // namespace

neuron_thresholds take_neuron_thresholds(llama_model_loader & ml, bool keep) {
    std::map<unsigned, weight> found;
    for (const auto & [name, w] : ml.weights_map) {
        uint64_t block = 0;
        if (gguf_flash::block_named(name, gguf_flash::threshold_name, block) && block <= UINT32_MAX) {
            found.emplace(unsigned(block), w);
        }
    }
    for (const auto & [block, w] : found) {
        ml.n_elements -= uint64_t(ggml_nelements(w.tensor));
        ml.n_tensors -= int(ml.weights_map.erase(gguf_flash::threshold_name(block)));
    }
    if (found.empty() || !keep) {
        return {};
    }
    neuron_thresholds out = make_tensors(ml, found);
    for (const auto & [block, tensor] : out.of_block) {
        if (ml.no_alloc) {
            tensor->buffer = out.buffer.get();
            continue;
        }
        const std::vector<float> values = read_values(ml, found.at(block));
        ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(float));
    }
    return out;
}
