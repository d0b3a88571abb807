// The FFN of one layer over the neurons its tokens activate (paper, sections 3 and 4).
//
// Output bits depend on the weights and the input only: not on the budget, the window, the reader,
// the number of threads or the order in which reads complete. Every dot product is ggml's own for
// the row's type; down rows are added in the order of their neurons, each thread its own columns.
#pragma once

#include "gguf_flash/model.h"

#include <atomic>

namespace gguf_flash {

// All arrays are float, rows contiguous, row starts given by the strides (in floats).
struct FfnInput {
    uint32_t n_tokens = 0;
    const float * x = nullptr; // [n_tokens, n_embd], what the FFN gets as input
    size_t x_stride = 0;
    // [n_tokens, n_ff]. Gate mode: the deciding part's output, bias added. Predictor mode: its scores,
    // whose sigmoid is compared with the layer's threshold.
    const float * scores = nullptr;
    size_t scores_stride = 0;
    // [n_tokens, n_ff of the next layer] or null: what the next layer's predictor makes of x. Its reads
    // then begin before its call; the output does not depend on it.
    const float * ahead_scores = nullptr;
    size_t ahead_stride = 0;
    uint64_t predictor_ns = 0;         // what the scores took, for the counters
    const float * gate_bias = nullptr; // [n_ff] or null; for parts that are in the bundle
    const float * up_bias = nullptr;   // [n_ff] or null
    // [n_ff] or null: the weights of an RMS norm over each token's n_ff hidden values, before down.
    const float * norm = nullptr;
    float norm_eps = 0.0f;
    float * out = nullptr; // [n_tokens, n_embd], without the down bias
    size_t out_stride = 0;
    Activation activation = Activation::from_graph; // what the graph asks for; the file's choice wins
};

// Lets nth threads meet. Waiting spins briefly, then yields: on a small machine the thread everybody
// waits for may need the processor.
class Barrier {
public:
    struct Breached {}; // thrown by wait() when a thread will not come

    void wait(int nth);
    // A thread leaves: whoever waits now or later is thrown out, until mend().
    void breach() { breached_.store(true, std::memory_order_release); }
    bool breached() const { return breached_.load(std::memory_order_acquire); }
    void mend(); // when nobody is inside

private:
    std::atomic<int> arrived_{ 0 };
    std::atomic<int> generation_{ 0 };
    std::atomic<bool> breached_{ false };
};

// One FFN call site. run() is entered by nth threads with the same input; different FfnOps of one
// model may run at the same time.
class FfnOp {
public:
    FfnOp(std::shared_ptr<Model> model, int layer_index);
    ~FfnOp();

    // After the last thread has left, status() says whether out is valid; on an error it is zero.
    void run(const FfnInput & in, int ith, int nth);
    const Status & status() const { return starved_ ? no_memory_ : status_; }
    Model & model() const { return *model_; }

private:
    friend class FfnRun;
    void clear(const FfnInput & in) const; // its output

    std::shared_ptr<Model> model_;
    int layer_index_;
    const Status no_memory_; // made while there is some
    bool starved_ = false;
    Status status_;
    Barrier barrier_;
    Barrier ends_;                     // where all meet before and after a call, whatever became of it
    std::unique_ptr<Session> session_; // on loan while run() is under way
};

// The score whose sigmoid is threshold: minus infinity for 0, which selects every neuron.
float score_limit(float threshold);

// act(v), zero when the threshold cuts it: v <= t for relu, relu_sqr and drelu, |act(v)| <= t for the others.
// Of drelu this is the gate's half; the up value is cut at 0.
float activate(Activation activation, float v, float threshold);

// Code::corrupt unless every value of the tensor of thresholds is finite and at least 0. `label` says of what.
Status check_thresholds(const std::string & label, const std::string & tensor, const std::vector<float> & values);

} // namespace gguf_flash
