// Loading: settings, the engine, virtual tensors.
#include "activation.h"
#include "flash_model.h"

#include "llama-impl.h"
#include "llama-model-loader.h"
#include "llama-model.h"

#include "ggml-backend.h"
#include "gguf.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>

namespace {

using gguf_flash::Settings;
using gguf_flash::Status;

constexpr const char * key_version = "flash_ffn.version";

void or_refuse(const Status & status) {
    if (!status.ok()) {
        flash_refuse(status);
    }
}

std::string float_text(double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.17g", value);
    return text;
}

std::string text_of(const llama_model_kv_override & o) {
    switch (o.tag) {
        case LLAMA_KV_OVERRIDE_TYPE_INT: return std::to_string(o.val_i64);
        case LLAMA_KV_OVERRIDE_TYPE_FLOAT: return float_text(o.val_f64);
        case LLAMA_KV_OVERRIDE_TYPE_BOOL: return o.val_bool ? "true" : "false";
        default: return o.val_str;
    }
}

void settings_from_overrides(Settings & settings, const llama_model_loader & ml) {
    const std::string prefix = "flash_ffn.";
    for (const auto & [key, value] : ml.kv_overrides) {
        if (key.rfind(prefix, 0) == 0) {
            or_refuse(settings.set(key.substr(prefix.size()), text_of(value)));
        }
    }
}

// The loader keeps no path: its open files are reached through /proc, and named by what they link to.
std::vector<std::string> open_paths(const llama_model_loader & ml, std::string & label) {
    std::vector<std::string> paths;
    for (const auto & file : ml.files) {
        paths.push_back("/proc/self/fd/" + std::to_string(file->file_id()));
    }
    char name[PATH_MAX];
    const ssize_t n = paths.empty() ? -1 : readlink(paths[0].c_str(), name, sizeof(name));
    label = n > 0 ? std::string(name, size_t(n)) : "model";
    return paths;
}

// The string under a key, "" if there is none.
std::string string_of(const llama_model_loader & ml, const char * key) {
    const int64_t id = gguf_find_key(ml.metadata, key);
    return id >= 0 && gguf_get_kv_type(ml.metadata, id) == GGUF_TYPE_STRING ? gguf_get_val_str(ml.metadata, id) : "";
}

// Their graphs multiply FFN matrices themselves. tests/patch/test_own_ffns.py compares the list with the
// pinned source; converters/architectures.py has the same.
constexpr llm_arch own_ffns[] = { LLM_ARCH_APERTUS, LLM_ARCH_GRANITE_SWITCH, LLM_ARCH_KIMI_K3, LLM_ARCH_RWKV6,
                                  LLM_ARCH_RWKV7 };

// Refuses, before any memory is reserved, what the first decode could only fail.
void refuse_own_ffn(llm_arch arch, const std::string & select) {
    const std::string name = llm_arch_name(arch);
    if (std::find(std::begin(own_ffns), std::end(own_ffns), arch) != std::end(own_ffns)) {
        flash_refuse({ gguf_flash::Code::unsupported, "cannot run architecture '" + name +
                                                          "' from flash: its graph in llama.cpp multiplies the FFN "
                                                          "matrices itself; run the dense model" });
    }
    if (arch == LLM_ARCH_GEMMA3N && select != to_string(gguf_flash::Select::gate)) {
        flash_refuse({ gguf_flash::Code::unsupported, "cannot run architecture '" + name +
                                                          "' from flash with select '" + select +
                                                          "': its graph compares all gate values of a token; convert "
                                                          "again with --select gate" });
    }
}

// Whether the gate's half of each fused ffn_up is a resident tensor of its own.
bool has_split_gates(const gguf_flash::Layout & layout) {
    return layout.fused && layout.select == gguf_flash::Select::gate;
}

// Bundles and what else is the engine's or the hooks' leave the loader's list; a bundle counts as the
// weights it holds.
void take_tensors(llama_model_loader & ml, const gguf_flash::Layout & layout) {
    for (const gguf_flash::LayerLayout & layer : layout.layers) {
        const gguf_flash::PredictorNames predictor(layer.layer);
        for (const std::string & name : { predictor.a, predictor.b, predictor.bias }) {
            ml.n_tensors -= layout.select == gguf_flash::Select::predictor ? int(ml.weights_map.erase(name)) : 0;
        }
        for (const std::string & name :
             { gguf_flash::threshold_name(layer.layer), gguf_flash::down_scale_name(layer.layer) }) {
            const auto found = ml.weights_map.find(name);
            if (found != ml.weights_map.end()) { // the engine reads it
                ml.n_tensors -= 1;
                ml.n_elements -= uint64_t(ggml_nelements(found->second.tensor));
                ml.weights_map.erase(found);
            }
        }
        if (has_split_gates(layout)) { // which no architecture with a fused ffn_up asks for
            ml.n_tensors -= int(ml.weights_map.erase(layer.block + ".ffn_gate.weight"));
        }
        ml.weights_map.erase(gguf_flash::bundle_name(layer.layer));
        ml.n_tensors -= 1;
        ml.n_elements -= layer.stride * layer.n_ff;
        ml.n_elements += uint64_t(layout.n_embd) * layer.n_ff * layer.parts.size();
    }
}

// Whether the model or a person, rather than the converter's table, says what the activation is.
bool activation_was_chosen(const llama_model_loader & ml) {
    return gguf_find_key(ml.metadata, (ml.arch_name + ".hidden_activation").c_str()) >= 0 ||
           string_of(ml, "flash_ffn.activation.source") == "asked";
}

// Bytes of the tokenizer's tables, about: from what vocabularies of 32,000 to 262,144 tokens took, of both
// kinds. The strings' nodes take most of it.
uint64_t vocabulary_bytes(const llama_model_loader & ml) {
    uint64_t entries = 0;
    for (const char * key : { "tokenizer.ggml.tokens", "tokenizer.ggml.merges" }) {
        const int64_t id = gguf_find_key(ml.metadata, key);
        entries +=
            id >= 0 && gguf_get_kv_type(ml.metadata, id) == GGUF_TYPE_ARRAY ? gguf_get_arr_n(ml.metadata, id) : 0;
    }
    return 160 * entries;
}

std::shared_mutex registry_mutex;
std::vector<flash_model *> registry;
std::vector<ggml_backend_buffer_t> registry_buffers; // of the same index

} // namespace

gguf_flash_model_ptr gguf_flash_open(llama_model_loader & ml, const llama_model & model) {
    gguf_flash::set_load_error({});
    const char * disable = std::getenv("GGUF_FLASH_DISABLE");
    if ((disable != nullptr && std::string(disable) == "1") || ml.metadata == nullptr) {
        return nullptr;
    }
    Settings settings;
    or_refuse(settings.set_from_environment());
    settings_from_overrides(settings, ml);
    if (gguf_find_key(ml.metadata, key_version) < 0) {
        return dense_activation(ml, model, settings);
    }
    for (const llama_device & device : model.devices) {
        if (std::string(ggml_backend_dev_name(device.dev)).rfind("RPC", 0) == 0) {
            flash_refuse({ gguf_flash::Code::unsupported,
                           "a flash-GGUF runs on this machine's CPU only; start without RPC "
                           "devices" });
        }
    }
    refuse_own_ffn(model.arch, string_of(ml, "flash_ffn.select"));
    std::string label;
    const std::vector<std::string> paths = open_paths(ml, label);
    const auto opening = ml.no_alloc ? gguf_flash::Opening::sizes : gguf_flash::Opening::contexts;
    auto engine = gguf_flash::Model::open(paths, label, settings, opening);
    or_refuse(engine.status());
    const gguf_flash::Layout & layout = engine.value()->layout();
    const uint64_t vocabulary = vocabulary_bytes(ml);
    or_refuse(engine.value()->set_host_memory(0, vocabulary));
    make_forks_safe();
    take_tensors(ml, layout);
    ml.use_mmap = false;
    const bool chosen = settings.activation != gguf_flash::Activation::from_graph || activation_was_chosen(ml);
    const gguf_flash::Stats stats = engine.value()->stats();
    LLAMA_LOG_INFO(
        "load_tensors: flash-GGUF %s, reader %s, %.1f MiB resident, %.1f MiB on flash, %.1f MiB of RAM in all\n",
        label.c_str(), stats.reader.c_str(), double(stats.resident_bytes) / (1 << 20),
        double(layout.bundle_bytes()) / (1 << 20), double(stats.ram_bytes) / (1 << 20));
    auto flash = std::make_unique<flash_model>(model, engine.value(), chosen);
    flash->vocabulary_bytes = vocabulary;
    flash->make_own_tensors(ml.no_alloc);
    return gguf_flash_model_ptr(flash.release());
}

ggml_tensor * gguf_flash_virtual_tensor(gguf_flash_model * flash, const llama_model_loader & ml,
                                        const std::string & name, const std::initializer_list<int64_t> & ne,
                                        int flags) {
    if (flash == nullptr) {
        return nullptr;
    }
    ggml_tensor * tensor = flash->virtual_tensor(name, ne);
    const bool again = tensor == nullptr && (flags & llama_model_loader::TENSOR_DUPLICATED) != 0;
    return again ? flash->shared_tensor(ml, name) : tensor;
}

bool gguf_flash_refuse_save(const llama_model * model) {
    if (gguf_flash::attached(model) == nullptr) {
        return false;
    }
    LLAMA_LOG_ERROR("gguf_flash: cannot save the model: its FFN weights are on flash, not in memory; "
                    "copy the flash-GGUF file instead\n");
    return true;
}

void flash_refuse(const Status & status) {
    gguf_flash::set_load_error(status);
    throw std::runtime_error("gguf_flash: " + status.message());
}

void gguf_flash_model_deleter::operator()(gguf_flash_model * model) const {
    delete model;
}

struct flash_model::expected_shape {
    int64_t ne0, ne1;
    ggml_type type;
};

flash_model::flash_model(const llama_model & owner, std::shared_ptr<gguf_flash::Model> engine, bool chosen)
    : owner(&owner), engine(std::move(engine)), activation_chosen(chosen) {
    const gguf_flash::Layout & layout = this->engine->layout();
    for (const gguf_flash::LayerLayout & layer : layout.layers) {
        reserved_bytes = std::max(reserved_bytes, size_t(layout.n_embd) * layer.n_ff * 2 * sizeof(float));
    }
    reserved = mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) {
        reserved = nullptr;
        flash_refuse({ gguf_flash::Code::io, "cannot reserve address space for virtual weights" });
    }
    buffer.reset(ggml_backend_cpu_buffer_from_ptr(reserved, reserved_bytes));
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ctx.reset(ggml_init({ ggml_tensor_overhead() * 3 * layout.layers.size(), nullptr, true }));
    gguf_flash::attach(&owner, this->engine);
    std::unique_lock<std::shared_mutex> lock(registry_mutex);
    registry.push_back(this);
    registry_buffers.push_back(buffer.get());
}

flash_model::~flash_model() {
    gguf_flash::detach(owner);
    {
        std::unique_lock<std::shared_mutex> lock(registry_mutex);
        const auto at = std::find(registry.begin(), registry.end(), this);
        registry_buffers.erase(registry_buffers.begin() + (at - registry.begin()));
        registry.erase(at);
    }
    buffer.reset();
    munmap(reserved, reserved_bytes);
}

// The shape of the dense matrix that a bundle's part stands for; false for any other name.
bool flash_model::expected(const std::string & name, expected_shape & shape) const {
    const gguf_flash::Layout & layout = engine->layout();
    const gguf_flash::LayerLayout * layer = layout.find_block(name);
    for (const gguf_flash::PartLayout & part :
         layer == nullptr ? std::vector<gguf_flash::PartLayout>() : layer->parts) {
        if (name != layer->block + ".ffn_" + gguf_flash::to_string(part.part) + ".weight" ||
            (layout.fused && part.part == gguf_flash::Part::gate)) {
            continue; // a fused file's gate rows are part of the graph's ffn_up
        }
        const bool down = part.part == gguf_flash::Part::down;
        shape.ne0 = down ? layer->n_ff : layout.n_embd;
        shape.ne1 = down ? layout.n_embd : layer->n_ff * (layout.fused ? 2 : 1);
        // Informative only; a transposed row need not be whole blocks.
        const ggml_type type = part.type == GGML_TYPE_I8 ? GGML_TYPE_Q8_0 : ggml_type(part.type);
        shape.type = shape.ne0 % ggml_blck_size(type) == 0 ? type : GGML_TYPE_F16;
        return true;
    }
    return false;
}

ggml_tensor * flash_model::virtual_tensor(const std::string & name, const std::initializer_list<int64_t> & ne) {
    const auto known = tensors.find(name);
    if (known != tensors.end()) {
        return known->second;
    }
    expected_shape shape;
    if (!expected(name, shape)) {
        return nullptr;
    }
    if (ne.size() != 2 || ne.begin()[0] != shape.ne0 || ne.begin()[1] != shape.ne1) {
        flash_refuse({ gguf_flash::Code::corrupt, "the architecture expects tensor '" + name +
                                                      "' in another shape than the bundles' " +
                                                      std::to_string(shape.ne0) + " by " + std::to_string(shape.ne1) +
                                                      "; convert the model again" });
    }
    ggml_tensor * tensor = ggml_new_tensor_2d(ctx.get(), shape.type, shape.ne0, shape.ne1);
    ggml_set_name(tensor, name.c_str());
    tensor->buffer = buffer.get();
    tensor->data = reserved;
    tensors.emplace(name, tensor);
    return tensor;
}

void flash_model::make_own_tensors(bool no_alloc) {
    const gguf_flash::Layout & layout = engine->layout();
    const bool predicts = layout.select == gguf_flash::Select::predictor;
    if (!predicts && !has_split_gates(layout)) {
        return;
    }
    own_ctx.reset(ggml_init({ ggml_tensor_overhead() * 3 * layout.layers.size(), nullptr, true }));
    auto tensor = [&](const std::string & name) {
        const gguf_flash::TensorPlace & place = *layout.tensor(name); // R17 and R22 proved it is there
        ggml_tensor * t = ggml_new_tensor_2d(own_ctx.get(), ggml_type(place.type), int64_t(place.ne[0]),
                                             place.ne.size() > 1 ? int64_t(place.ne[1]) : 1);
        ggml_set_name(t, name.c_str());
        return t;
    };
    for (const gguf_flash::LayerLayout & layer : layout.layers) {
        if (predicts) {
            const gguf_flash::PredictorNames names(layer.layer);
            predictors.push_back({ tensor(names.a), tensor(names.b), tensor(names.bias) });
        } else {
            gates.push_back(tensor(layer.block + ".ffn_gate.weight"));
        }
    }
    reserve_own_tensors(no_alloc);
}

void flash_model::reserve_own_tensors(bool no_alloc) {
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    own_buffer.reset(no_alloc ? ggml_backend_buft_alloc_buffer(type, 0)
                              : ggml_backend_alloc_ctx_tensors_from_buft(own_ctx.get(), type));
    if (own_buffer == nullptr) {
        flash_refuse({ gguf_flash::Code::ram_too_small, "cannot reserve memory for predictors or gates" });
    }
    ggml_backend_buffer_set_usage(own_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (ggml_tensor * t = ggml_get_first_tensor(own_ctx.get()); no_alloc && t != nullptr;
         t = ggml_get_next_tensor(own_ctx.get(), t)) {
        t->buffer = own_buffer.get();
    }
}

uint64_t flash_model::own_bytes() const {
    uint64_t bytes = 0;
    ggml_tensor * t = own_ctx == nullptr ? nullptr : ggml_get_first_tensor(own_ctx.get());
    for (; t != nullptr; t = ggml_get_next_tensor(own_ctx.get(), t)) {
        bytes += ggml_nbytes(t);
    }
    return bytes;
}

flash_model * flash_model_by(const llama_model * owner) {
    std::shared_lock<std::shared_mutex> lock(registry_mutex);
    const auto at =
        std::find_if(registry.begin(), registry.end(), [&](const flash_model * m) { return m->owner == owner; });
    return at == registry.end() ? nullptr : *at;
}

static flash_model * owner_locked(const ggml_tensor * tensor) {
    if (tensor == nullptr || tensor->buffer == nullptr) {
        return nullptr;
    }
    const auto at = std::find(registry_buffers.begin(), registry_buffers.end(), tensor->buffer);
    return at == registry_buffers.end() ? nullptr : registry[size_t(at - registry_buffers.begin())];
}

flash_model * flash_model_of(const ggml_tensor * tensor) {
    std::shared_lock<std::shared_mutex> lock(registry_mutex);
    return owner_locked(tensor);
}

const ggml_tensor * find_virtual_source(ggml_cgraph * gf) {
    std::shared_lock<std::shared_mutex> lock(registry_mutex);
    for (int i = 0; !registry.empty() && i < ggml_graph_n_nodes(gf); ++i) {
        for (const ggml_tensor * src : ggml_graph_node(gf, i)->src) {
            if (owner_locked(src) != nullptr) {
                return src;
            }
        }
    }
    return nullptr;
}
