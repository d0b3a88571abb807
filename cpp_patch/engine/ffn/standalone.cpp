#include "gguf_flash/standalone.h"

#include "ggml-cpu.h"
#include "gguf_flash/kernels.h"
#include "layer_state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <thread>

namespace gguf_flash {

struct Standalone::Matrix {
    std::vector<uint8_t> rows; // empty: the file has none
    int type = 0;
    uint32_t n_rows = 0, n_columns = 0;
};

struct Standalone::LayerWeights {
    std::vector<float> gate_bias, up_bias, down_bias; // empty: the file has none
    Matrix deciding;                                  // gate mode: the matrix that decides
    Matrix pred_a, pred_b;                            // predictor mode
    std::vector<float> pred_bias;
};

namespace {

// Runs f(ith, nth) on nth threads, the caller's among them. Fewer than n where the system refuses more:
// the result does not depend on their number. A thread without memory is the caller without memory.
void run_threads(int n, const std::function<void(int, int)> & f) {
    std::promise<int> started;
    const std::shared_future<int> nth = started.get_future().share();
    std::atomic<bool> starved{ false };
    const auto work = [&f, &starved](int ith, int count) {
        try {
            f(ith, count);
        } catch (const std::bad_alloc &) {
            starved = true;
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(size_t(n));
    try {
        for (int i = 1; i < n; ++i) {
            threads.emplace_back([&work, nth, i] { work(i, nth.get()); });
        }
    } catch (const std::system_error &) {
    } catch (const std::bad_alloc &) {
    }
    const int count = int(threads.size()) + 1;
    started.set_value(count);
    work(0, count);
    for (std::thread & t : threads) {
        t.join();
    }
    if (starved) {
        throw std::bad_alloc();
    }
}

} // namespace

Standalone::Standalone() = default;
Standalone::~Standalone() = default;

Result<std::shared_ptr<Standalone>> Standalone::open(const std::string & path, const Settings & settings) {
    try {
        return load(path, settings);
    } catch (const std::bad_alloc &) {
        return without_memory("open", path);
    }
}

Result<std::shared_ptr<Standalone>> Standalone::load(const std::string & path, const Settings & settings) {
    ggml_cpu_init(); // tables of halves
    std::shared_ptr<Standalone> out(new Standalone());
    Result<std::shared_ptr<Model>> model = Model::open(split_paths(path), path, settings);
    if (!model.ok()) {
        return model.status();
    }
    out->model_ = model.value();
    const std::string & arch = out->model_->layout().architecture;
    if (arch == "bitnet" || arch == "gemma3n") {
        return Status(Code::unsupported, "cannot compute the FFNs of '" + path + "' alone: architecture '" + arch +
                                             "' normalizes or ranks their values in its graph; load it in llama.cpp");
    }
    Status status = out->load_weights();
    if (!status.ok()) {
        return status;
    }
    return out;
}

Status Standalone::load_weights() {
    const Layout & layout = model_->layout();
    for (const LayerLayout & l : layout.layers) {
        const std::string block = l.block + ".ffn_";
        LayerWeights w;
        Status status = read_bias(block + "gate.bias", l.n_ff, w.gate_bias);
        status = status.ok() ? read_bias(block + "up.bias", l.n_ff * (layout.fused ? 2 : 1), w.up_bias) : status;
        if (layout.fused && !w.up_bias.empty()) { // as the matrix: the gate's half, then up's
            w.gate_bias.assign(w.up_bias.begin(), w.up_bias.begin() + l.n_ff);
            w.up_bias.erase(w.up_bias.begin(), w.up_bias.begin() + l.n_ff);
        }
        status = status.ok() ? read_bias(block + "down.bias", layout.n_embd, w.down_bias) : status;
        if (layout.select == Select::gate) {
            status = status.ok() ? read_matrix(block + (layout.gated ? "gate" : "up") + ".weight", w.deciding) : status;
        } else if (layout.select == Select::predictor) {
            const PredictorNames names(l.layer);
            status = status.ok() ? read_matrix(names.a, w.pred_a) : status;
            status = status.ok() ? read_matrix(names.b, w.pred_b) : status;
            status = status.ok() ? read_bias(names.bias, l.n_ff, w.pred_bias) : status;
        }
        if (!status.ok()) {
            return status;
        }
        layers_.push_back(std::move(w));
    }
    return {};
}

// A matrix that the reader proved to be there (R17, R22).
Status Standalone::read_matrix(const std::string & name, Matrix & to) const {
    const TensorPlace & place = *model_->layout().tensor(name);
    to.type = place.type;
    to.n_columns = uint32_t(place.ne[0]);
    to.n_rows = uint32_t(place.ne[1]);
    return read_tensor(model_->layout(), place, to.rows);
}

Status Standalone::read_bias(const std::string & name, uint32_t n, std::vector<float> & to) const {
    const TensorPlace * found = model_->layout().tensor(name);
    if (found == nullptr) {
        return {};
    }
    const TensorPlace & place = *found;
    std::vector<uint8_t> raw;
    const Status status = read_tensor(model_->layout(), place, raw);
    if (!status.ok()) {
        return status;
    }
    if (place.type != GGML_TYPE_F32 || raw.size() != n * sizeof(float)) {
        return { Code::unsupported, "tensor '" + name + "' of '" + model_->label() + "': " + std::to_string(n) +
                                        " values of type F32 expected" };
    }
    to.resize(n);
    std::memcpy(to.data(), raw.data(), raw.size());
    return {};
}

// out[n_tokens, n_rows] = x times the matrix, plus bias if it is not empty: this thread's rows.
void Standalone::multiply(const Matrix & m, const std::vector<float> & bias, const float * x, uint32_t n_tokens,
                          float * out, int ith, int nth) {
    const size_t row = ggml_row_size(ggml_type(m.type), m.n_columns);
    const uint32_t first = uint32_t(uint64_t(m.n_rows) * ith / nth),
                   end = uint32_t(uint64_t(m.n_rows) * (ith + 1) / nth);
    std::vector<uint8_t> converted(dot_input_bytes(m.type, m.n_columns));
    for (uint32_t t = 0; t < n_tokens; ++t) {
        const float * given = x + size_t(t) * m.n_columns;
        const void * xt = given;
        if (!converted.empty()) {
            convert_dot_input(m.type, given, m.n_columns, converted.data());
            xt = converted.data();
        }
        for (uint32_t i = first; i < end; ++i) {
            const float sum = dot_row(m.type, m.rows.data() + i * row, xt, m.n_columns);
            out[size_t(t) * m.n_rows + i] = sum + (bias.empty() ? 0.0f : bias[i]);
        }
    }
}

Status Standalone::find_layer(uint32_t layer, int n_threads, int & index) const {
    index = model_->index_of(layer);
    if (index < 0) {
        return { Code::argument, "layer " + std::to_string(layer) + " of '" + model_->label() + "' is not bundled" };
    }
    if (n_threads < 1 || n_threads > 1024) {
        return { Code::argument, "1 to 1024 threads expected, found " + std::to_string(n_threads) };
    }
    return {};
}

Status Standalone::scores(uint32_t layer, const float * x, uint32_t n_tokens, std::vector<float> & to,
                          int n_threads) const {
    int index = 0;
    const Status status = find_layer(layer, n_threads, index);
    const Layout & layout = model_->layout();
    to.clear();
    if (!status.ok() || n_tokens == 0 || layout.select == Select::all) {
        return status;
    }
    const LayerWeights & w = layers_[size_t(index)];
    to.resize(size_t(n_tokens) * layout.layers[size_t(index)].n_ff);
    if (layout.select == Select::gate) {
        const std::vector<float> & bias = layout.gated ? w.gate_bias : w.up_bias;
        run_threads(n_threads, [&](int ith, int nth) { multiply(w.deciding, bias, x, n_tokens, to.data(), ith, nth); });
        return {};
    }
    std::vector<float> hidden(size_t(n_tokens) * w.pred_a.n_rows);
    run_threads(n_threads, [&](int ith, int nth) { multiply(w.pred_a, {}, x, n_tokens, hidden.data(), ith, nth); });
    for (float & h : hidden) {
        h = std::max(h, 0.0f);
    }
    run_threads(n_threads, [&](int ith, int nth) {
        multiply(w.pred_b, w.pred_bias, hidden.data(), n_tokens, to.data(), ith, nth);
    });
    return {};
}

Status Standalone::ffn(uint32_t layer, const float * x, uint32_t n_tokens, float * out, int n_threads) {
    try {
        return compute(layer, x, n_tokens, out, n_threads);
    } catch (const std::bad_alloc &) {
        std::fill_n(out, size_t(n_tokens) * model_->layout().n_embd, 0.0f);
        return without_memory("compute a layer of", model_->label());
    }
}

Status Standalone::compute(uint32_t layer, const float * x, uint32_t n_tokens, float * out, int n_threads) {
    int index = 0;
    std::vector<float> scored;
    Status status = find_layer(layer, n_threads, index);
    if (status.ok() && !(status = model_->check_files()).ok()) {
        std::fill_n(out, size_t(n_tokens) * model_->layout().n_embd, 0.0f);
    }
    status = status.ok() ? scores(layer, x, n_tokens, scored, n_threads) : status;
    if (!status.ok() || n_tokens == 0) {
        return status;
    }
    const Layout & layout = model_->layout();
    const LayerWeights & w = layers_[size_t(index)];
    FfnInput in;
    in.n_tokens = n_tokens;
    in.x = x;
    in.x_stride = in.out_stride = layout.n_embd;
    in.scores = scored.empty() ? nullptr : scored.data();
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
