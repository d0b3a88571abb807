// Resident weights: where they lie in memory, and reading them past the page cache.
#include "flash_model.h"

#include "llama-model-loader.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <tuple>

namespace {

using gguf_flash::Resident;

// A tensor that waits for its bytes.
struct wanted {
    ggml_tensor * tensor;
    Resident from;
    bool counted; // by llama.cpp's progress
};

// Buffers that keep weights in an order of their own take a whole tensor and copy it. As llama.cpp does,
// those come first, the largest in front: the copy is there while the fewest weights are.
bool comes_before(const wanted & a, const wanted & b) {
    const bool lent_a = a.from.to == nullptr, lent_b = b.from.to == nullptr;
    if (lent_a != lent_b) {
        return lent_a;
    }
    if (lent_a && a.from.bytes != b.from.bytes) {
        return a.from.bytes > b.from.bytes;
    }
    return std::tie(a.from.file, a.from.offset) < std::tie(b.from.file, b.from.offset);
}

void want(std::vector<wanted> & list, ggml_tensor * t, uint32_t file, uint64_t offset, bool counted) {
    uint8_t * to = ggml_backend_buffer_is_host(t->buffer) ? static_cast<uint8_t *>(t->data) : nullptr;
    list.push_back({ t, { t->name, file, offset, ggml_nbytes(t), to }, counted });
}

bool in_ram(ggml_backend_buffer_t buffer) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    return device == nullptr || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

// Before they are touched: fewer entries for the processor to look up when all weights stream by. Only
// whole huge pages inside a buffer, so that no memory is taken that it does not need; a refusal changes
// nothing.
void ask_for_huge_pages(const std::vector<wanted> & list) {
#ifdef MADV_HUGEPAGE
    std::set<ggml_backend_buffer_t> buffers;
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    for (const wanted & w : list) {
        if (in_ram(w.tensor->buffer) && buffers.insert(w.tensor->buffer).second) {
            const uintptr_t base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(w.tensor->buffer));
            const uintptr_t begin = (base + page - 1) / page * page;
            const uintptr_t end = (base + ggml_backend_buffer_get_size(w.tensor->buffer)) / page * page;
            if (end > begin) {
                madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
            }
        }
    }
#else
    (void)list;
#endif
}

} // namespace

ggml_tensor * flash_model::shared_tensor(const llama_model_loader & ml, const std::string & name) {
    for (const auto & [key, made] : ml.ctx_map) {
        ggml_tensor * t = owner->devices.empty() ? ggml_get_tensor(made.get(), name.c_str()) : nullptr;
        if (t != nullptr) {
            return t;
        }
    }
    return nullptr;
}

bool flash_model::load(llama_model_loader & ml, const std::function<bool(float)> & progress) {
    std::vector<wanted> list;
    for (ggml_tensor * t = own_ctx ? ggml_get_first_tensor(own_ctx.get()) : nullptr; t != nullptr;
         t = ggml_get_next_tensor(own_ctx.get(), t)) {
        const gguf_flash::TensorPlace & place = *engine->layout().tensor(t->name); // R17 and R22 proved it is there
        want(list, t, place.file, place.offset, false);
    }
    for (const auto & [name, t] : owner->tensors_by_name) {
        const auto * weight = ml.get_weight(ggml_get_name(t));
        if (weight != nullptr && t->buffer != nullptr && !ml.lazy.has(t) && !ml.check_tensors) { // its check reads, too
            want(list, t, weight->idx, weight->offs, true);
        }
    }
    std::sort(list.begin(), list.end(), comes_before);
    ask_for_huge_pages(list);
    std::vector<Resident> tensors;
    for (const wanted & w : list) {
        tensors.push_back(w.from);
    }
    auto next = list.begin();
    const auto loaded = [&](const Resident & from, const uint8_t * data) {
        const wanted & w = *next++;
        if (from.to == nullptr) {
            ggml_backend_tensor_set(w.tensor, data, 0, from.bytes);
        }
        ml.size_done += w.counted ? from.bytes : 0;
        return progress(ml.size_data > 0 ? float(ml.size_done) / float(ml.size_data) : 0.0f);
    };
    const gguf_flash::Result<bool> all = engine->load_resident(tensors, loaded);
    if (!all.ok()) {
        flash_refuse(all.status());
    }
    for (const wanted & w : list) {
        ml.weights_map.erase(w.from.name); // so that llama.cpp does not load it again
    }
    return all.value();
}

bool gguf_flash_load(gguf_flash_model * flash, llama_model_loader & ml, bool (*progress)(float, void *),
                     void * user_data) {
    return flash == nullptr || flash->load(ml, [&](float done) { return !progress || progress(done, user_data); });
}
