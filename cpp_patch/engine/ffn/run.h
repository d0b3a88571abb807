// Private to ffn/: one call of FfnOp, as every one of its threads sees it.
//
// Thread 0 plans (selection, cache, reads); all compute. Between the steps lie barriers that every
// thread passes, on error paths too.
#pragma once

#include "layer_state.h"

#include <chrono>

namespace gguf_flash {

class FfnRun {
public:
    FfnRun(FfnOp & op, const FfnInput & in, int ith, int nth);

    void execute();
    void abandon();

private:
    void abandon_ahead();

    // run.cpp: order of steps
    void steps();
    void begin();  // thread 0
    void finish(); // thread 0
    void run_waves();
    void run_stream();
    bool failed() const { return session().failed.load(std::memory_order_acquire); }
    void barrier() { op_.barrier_.wait(nth_); }
    Session & session() const { return *op_.session_; }
    LayerState & state() const { return state_; }

    // select.cpp: which neurons
    size_t x_bytes(Part part) const;
    void reserve_x();     // thread 0
    void quantize_x();    // this thread's tokens
    void mark_selected(); // this thread's neurons
    void mark_predicted(uint32_t first, uint32_t end);
    bool predicted(uint32_t token, uint32_t neuron) const {
        return in_.scores[token * in_.scores_stride + neuron] > score_limit_;
    }
    void list_selected(); // thread 0
    bool should_stream() const;

    // wave.cpp: what to read, and the reads (thread 0)
    uint32_t plan_wave(uint32_t first);
    uint32_t whole_blocks(uint32_t first, uint32_t end);
    bool in_one_block(uint32_t a, uint32_t b) const;
    void offer_items(uint32_t wave);
    bool make_room(uint32_t from);
    void submit_misses();
    void submit_run(uint32_t run);
    void pump(bool block);
    void drain();
    void complete(ReadOp & op);
    void release_wave(uint32_t first, uint32_t end);

    // lookahead.cpp: the next layer's reads (thread 0)
    void settle(LayerState & state);
    void judge_foresight();
    void look_ahead();
    void acquire_ahead(LayerState & next);
    void accept(const Arrival & arrival);

    // stream.cpp: a layer in sequence (thread 0)
    void submit_chunk(uint32_t chunk);
    bool await_chunk(uint32_t chunk);
    void reap_chunks();
    void admit(uint32_t chunk, uint32_t first, uint32_t end);
    uint64_t chunk_offset(uint32_t chunk) const;
    uint32_t chunk_neurons() const;

    // compute.cpp: all threads
    void compute_items(uint32_t first, uint32_t n_items, uint32_t wave);
    bool await_item(uint32_t item);
    void decide(uint32_t index, float * h, uint32_t wave, const float * products);
    void conclude(uint32_t index, float * h, uint32_t wave, const float * products);
    float dot(Part part, uint32_t index, uint32_t token) const;
    void clear_output();
    void accumulate(uint32_t first, uint32_t end);
    void note_active(uint32_t wave);
    void add_active(const float * rows, size_t ld, const float * h, uint32_t active, float * y, size_t n) const;
    void accumulate_expanded(const PartLayout & down, uint32_t first, uint32_t end, size_t column, size_t n);
    void my_columns(size_t & first, size_t & n) const;

    // together.cpp: several neurons' products with a prompt
    static constexpr uint32_t together_tokens = 8; // from here on
    void compute_together(const uint32_t * items, uint32_t n, uint32_t first, uint32_t wave);
    uint64_t count_predicted(uint32_t neuron) const;
    const float * products_of(Part part, const uint32_t * items, uint32_t n, uint64_t needed);

    // codes.cpp: down rows that are codes of Q8_0 blocks, all threads
    void accumulate_codes(uint32_t first, uint32_t end);
    void gather_block_rows(CodeScratch & scratch, uint32_t first, uint32_t end, size_t column) const;
    void quantize_h(CodeScratch & scratch, uint32_t token, uint32_t first, uint32_t end) const;
    void reserve_lanes(); // thread 0
    void clear_lanes();
    void sum_lanes_up();
    float * lanes(uint32_t token, size_t column) const;

    // normalize.cpp: the norm over hidden values, if the call has one
    float weighted(float h, uint32_t neuron, size_t place);
    void add_squares(uint32_t wave);
    void scale_output();

    void fail(Status status);
    using Clock = std::chrono::steady_clock;
    static uint64_t since(Clock::time_point start) {
        return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
    }

    FfnOp & op_;
    const FfnInput & in_;
    LayerState & state_;
    const int ith_, nth_;
    const uint32_t n_embd_;
    Activation activation_;
    const Select select_;
    const float score_limit_; // predictor mode: a neuron is selected by a score above it

    std::vector<double> sums_; // of each token's squared hidden values

    // thread 0 only
    Clock::time_point start_;
    uint64_t io_ns_ = 0, mem_ns_ = 0;
    uint32_t outstanding_ = 0; // reads of the wave under way
    uint32_t late_ = 0;        // neurons of the wave that were read ahead and have not arrived
    uint32_t foreseen_ = 0;    // selected neurons that were read ahead, until they are counted
    uint32_t wave_first_ = 0, segments_used_ = 0;
    uint32_t chunks_ = 0; // reads of the stream under way
    std::unique_lock<std::mutex> lock_;
};

} // namespace gguf_flash
