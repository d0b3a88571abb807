#include "gguf_flash/standalone.h"

#include "ggml-cpu.h"
#include "gguf_flash/kernels.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <thread>

namespace gguf_flash {

struct Standalone::LayerWeights {
    std::vector<float> gate_bias, up_bias, down_bias; // empty: the file has none
    std::vector<uint8_t> deciding;                    // gate mode: the rows of the matrix that decides
    int deciding_type = 0;
};

namespace {

// Runs f(ith, nth) on nth threads, the caller's among them. Fewer than n where the system refuses more:
// the result does not depend on their number.
void run_threads(int n, const std::function<void(int, int)> & f) {
    std::promise<int> started;
    const std::shared_future<int> nth = started.get_future().share();
    std::vector<std::thread> threads;
    try {
        for (int i = 1; i < n; ++i) {
            threads.emplace_back([&f, nth, i] { f(i, nth.get()); });
        }
    } catch (const std::system_error &) {
    }
    const int count = int(threads.size()) + 1;
    started.set_value(count);
    f(0, count);
    for (std::thread & t : threads) {
        t.join();
    }
}

} // namespace

Standalone::Standalone() = default;
Standalone::~Standalone() = default;

Result<std::shared_ptr<Standalone>> Standalone::open(const std::string & path, const Settings & settings) {
    ggml_cpu_init(); // tables of halves
    std::shared_ptr<Standalone> out(new Standalone());
    Result<std::shared_ptr<Model>> model = Model::open(split_paths(path), path, settings);
    if (!model.ok()) {
        return model.status();
    }
    out->model_ = model.value();
    Status status = out->load();
    if (!status.ok()) {
        return status;
    }
    return out;
}

Status Standalone::load() {
    const Layout & layout = model_->layout();
    for (const LayerLayout & l : layout.layers) {
        const std::string block = "blk." + std::to_string(l.layer) + ".ffn_";
        LayerWeights w;
        Status status = read_bias(block + "gate.bias", l.n_ff, w.gate_bias);
        status = status.ok() ? read_bias(block + "up.bias", l.n_ff * (layout.fused ? 2 : 1), w.up_bias) : status;
        if (layout.fused && !w.up_bias.empty()) { // as the matrix: the gate's half, then up's
            w.gate_bias.assign(w.up_bias.begin(), w.up_bias.begin() + l.n_ff);
            w.up_bias.erase(w.up_bias.begin(), w.up_bias.begin() + l.n_ff);
        }
        status = status.ok() ? read_bias(block + "down.bias", layout.n_embd, w.down_bias) : status;
        if (status.ok() && layout.select == Select::gate) {
            const std::string name = block + (layout.gated ? "gate" : "up") + ".weight";
            w.deciding_type = layout.tensor(name)->type; // R17 proved it is there
            status = read(name, true, w.deciding);
        }
        if (!status.ok()) {
            return status;
        }
        layers_.push_back(std::move(w));
    }
    return {};
}

Status Standalone::read(const std::string & name, bool required, std::vector<uint8_t> & to) const {
    const TensorPlace * place = model_->layout().tensor(name);
    if (place == nullptr) {
        return required ? Status(Code::corrupt, "tensor '" + name + "' is missing in '" + model_->label() + "'")
                        : Status();
    }
    const std::string & path = model_->layout().files[place->file];
    std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
    to.resize(place->bytes);
    if (!file || fseeko(file.get(), off_t(place->offset), SEEK_SET) != 0 ||
        std::fread(to.data(), 1, to.size(), file.get()) != to.size()) {
        return { Code::io, "cannot read tensor '" + name + "' of '" + path +
                               "': " + read_error(file && !std::ferror(file.get()) ? ENODATA : errno) };
    }
    return {};
}

Status Standalone::read_bias(const std::string & name, uint32_t n, std::vector<float> & to) const {
    std::vector<uint8_t> raw;
    Status status = read(name, false, raw);
    if (!status.ok() || raw.empty()) {
        return status;
    }
    const TensorPlace & place = *model_->layout().tensor(name);
    if (place.type != GGML_TYPE_F32 || raw.size() != n * sizeof(float)) {
        return { Code::unsupported, "tensor '" + name + "' of '" + model_->label() + "': " + std::to_string(n) +
                                        " values of type F32 expected" };
    }
    to.resize(n);
    std::memcpy(to.data(), raw.data(), raw.size());
    return {};
}

// scores[n_tokens, n_ff] of the resident deciding matrix, this thread's neurons.
void Standalone::score(const LayerWeights & w, const float * x, uint32_t n_tokens, std::vector<float> & scores, int ith,
                       int nth) const {
    const uint32_t n_embd = model_->layout().n_embd, n_ff = uint32_t(scores.size() / n_tokens);
    const size_t row = ggml_row_size(ggml_type(w.deciding_type), n_embd);
    std::vector<uint8_t> converted(dot_input_bytes(w.deciding_type, n_embd));
    const std::vector<float> & bias = model_->layout().gated ? w.gate_bias : w.up_bias;
    for (uint32_t t = 0; t < n_tokens; ++t) {
        const void * xt = x + size_t(t) * n_embd;
        if (!converted.empty()) {
            convert_dot_input(w.deciding_type, x + size_t(t) * n_embd, n_embd, converted.data());
            xt = converted.data();
        }
        for (uint32_t i = uint32_t(uint64_t(n_ff) * ith / nth); i < uint64_t(n_ff) * (ith + 1) / nth; ++i) {
            const float sum = dot_row(w.deciding_type, w.deciding.data() + i * row, xt, n_embd);
            scores[size_t(t) * n_ff + i] = sum + (bias.empty() ? 0.0f : bias[i]);
        }
    }
}

Status Standalone::ffn(uint32_t layer, const float * x, uint32_t n_tokens, float * out, int n_threads) {
    const int index = model_->index_of(layer);
    if (index < 0) {
        return { Code::argument, "layer " + std::to_string(layer) + " of '" + model_->label() + "' is not bundled" };
    }
    if (n_threads < 1 || n_threads > 1024) {
        return { Code::argument, "1 to 1024 threads expected, found " + std::to_string(n_threads) };
    }
    if (n_tokens == 0) {
        return {};
    }
    const Layout & layout = model_->layout();
    const LayerWeights & w = layers_[size_t(index)];
    std::vector<float> scores;
    if (layout.select == Select::gate) {
        scores.resize(size_t(n_tokens) * layout.layers[size_t(index)].n_ff);
        run_threads(n_threads, [&](int ith, int nth) { score(w, x, n_tokens, scores, ith, nth); });
    }
    FfnInput in;
    in.n_tokens = n_tokens;
    in.x = x;
    in.x_stride = in.out_stride = layout.n_embd;
    in.scores = scores.empty() ? nullptr : scores.data();
    in.scores_stride = layout.layers[size_t(index)].n_ff;
    in.gate_bias = w.gate_bias.empty() ? nullptr : w.gate_bias.data();
    in.up_bias = w.up_bias.empty() ? nullptr : w.up_bias.data();
    in.out = out;
    FfnOp op(model_, index);
    run_threads(n_threads, [&](int ith, int nth) { op.run(in, ith, nth); });
    for (uint32_t t = 0; op.status().ok() && t < n_tokens && !w.down_bias.empty(); ++t) {
        for (uint32_t i = 0; i < layout.n_embd; ++i) {
            out[size_t(t) * layout.n_embd + i] += w.down_bias[i];
        }
    }
    return op.status();
}

} // namespace gguf_flash
