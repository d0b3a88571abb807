#include "run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <thread>

namespace gguf_flash {

void Barrier::wait(int nth) {
    if (breached()) {
        throw Breached();
    }
    if (nth <= 1) {
        return;
    }
    const int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == nth - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
        return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
        if (spins > 200) {
            std::this_thread::yield();
            if (breached()) {
                throw Breached();
            }
        }
    }
}

void Barrier::mend() {
    arrived_.store(0);
    breached_.store(false);
}

float score_limit(float threshold) {
    return threshold <= 0 ? -std::numeric_limits<float>::infinity()
                          : float(std::log(double(threshold)) - std::log1p(-double(threshold)));
}

FfnOp::FfnOp(std::shared_ptr<Model> model, int layer_index)
    : model_(std::move(model)), layer_index_(layer_index),
      no_memory_(without_memory("compute layer " + std::to_string(model_->layout().layers[size_t(layer_index)].layer) +
                                " of '" + model_->label() + "'")) {}
FfnOp::~FfnOp() = default;

void FfnOp::run(const FfnInput & in, int ith, int nth) {
    if (ith == 0) {
        status_ = Status();
        starved_ = false;
        try {
            Result<std::unique_ptr<Session>> session = model_->borrow();
            session_ = session.ok() ? std::move(session.value()) : nullptr;
            status_ = session.status();
        } catch (const std::bad_alloc &) {
            starved_ = true;
        }
    }
    ends_.wait(nth);
    if (session_ != nullptr) {
        FfnRun run(*this, in, ith, nth);
        run.execute();
        ends_.wait(nth);
        if (ith == 0 && barrier_.breached()) {
            run.abandon();
        }
    } else if (ith == 0) {
        clear(in);
    }
    if (ith == 0 && session_ != nullptr) {
        model_->give_back(std::move(session_));
    }
}

void FfnOp::clear(const FfnInput & in) const {
    for (uint32_t t = 0; t < in.n_tokens; ++t) {
        std::memset(in.out + t * in.out_stride, 0, model_->layout().n_embd * sizeof(float));
    }
}

FfnRun::FfnRun(FfnOp & op, const FfnInput & in, int ith, int nth)
    : op_(op), in_(in), state_(op.model_->layer(op.layer_index_)), ith_(ith), nth_(nth),
      n_embd_(op.model_->layout().n_embd), activation_(op.model_->layout().activation),
      select_(op.model_->layout().select), score_limit_(score_limit(state_.layout.predictor_threshold)) {
    if (activation_ == Activation::from_graph) {
        activation_ = in.activation;
    }
}

// A thread without memory leaves the call, and so do the others at their next barrier.
void FfnRun::execute() {
    try {
        steps();
    } catch (const std::bad_alloc &) {
        session().failed.store(true, std::memory_order_release); // for who waits for a read
        op_.barrier_.breach();
    } catch (const Barrier::Breached &) {
    }
}

// Thread 0, when all have left: nothing of the call may be believed, neither what its reads left in the
// cache nor the session's scratch. Asks for no memory: there is none.
void FfnRun::abandon() {
    op_.session_.reset(); // waits for its reads
    if (!lock_.owns_lock()) {
        lock_.lock();
    }
    abandon_ahead();
    state_.forget();
    lock_.unlock();
    op_.clear(in_);
    op_.barrier_.mend();
    op_.starved_ = true;
}

// Reads ahead write into slots, too.
void FfnRun::abandon_ahead() {
    if (op_.model_->ahead() != nullptr) {
        op_.model_->ahead()->settle(state_);
        state_.ahead.clear();
    }
}

void FfnRun::steps() {
    if (ith_ == 0) {
        begin();
    }
    clear_output();
    barrier();
    if (!failed()) {
        clear_lanes();
    }
    quantize_x();
    mark_selected();
    barrier();
    if (ith_ == 0) {
        judge_foresight();
        const Clock::time_point t = Clock::now();
        list_selected();
        session().streaming = should_stream();
        mem_ns_ += since(t);
    }
    barrier();
    const bool stream = session().streaming, go = !failed();
    barrier(); // everybody has read the two before thread 0 goes on
    if (go) {
        stream ? run_stream() : run_waves();
        scale_output();
        barrier();
    }
    if (failed()) {
        clear_output();
    } else if (state_.codes) {
        sum_lanes_up();
    }
    if (ith_ == 0) {
        finish();
    }
}

void FfnRun::begin() {
    start_ = Clock::now();
    lock_ = std::unique_lock<std::mutex>(state_.lock);
    if (state_.pid != getpid()) { // a fork's child: its slots are empty
        abandon_ahead();
        state_.forget();
        state_.pid = getpid();
    }
    Session & s = session();
    op_.model_->renew(s);
    s.failed.store(false);
    s.not_a_number.store(false);
    s.last.assign(state_.layout.n_ff, 0);
    s.listed.resize(state_.layout.n_ff);
    s.expanded.resize(std::max<size_t>(s.expanded.size(), size_t(nth_)));
    s.active.resize(std::max<size_t>(s.active.size(), size_t(nth_)));
    reserve_lanes();
    reserve_x();
    state_.cache.begin(in_.n_tokens);
    if (activation_ == Activation::from_graph) {
        fail({ Code::argument, "the activation of '" + op_.model_->label() +
                                   "' is not known: the file does not name "
                                   "it; set flash_ffn.activation, or GGUF_FLASH_ACTIVATION" });
    }
    if (state_.codes && in_.norm != nullptr) {
        fail({ Code::unsupported, "layer " + std::to_string(state_.layout.layer) + " of '" + op_.model_->label() +
                                      "' has down codes and a norm before them; convert the model again" });
    }
    if ((select_ == Select::all) != (in_.scores == nullptr)) {
        fail({ Code::argument, "layer " + std::to_string(state_.layout.layer) + " of '" + op_.model_->label() +
                                   "' needs scores in every mode but all" });
    }
}

void FfnRun::finish() {
    const Clock::time_point t = Clock::now();
    state_.cache.end();
    if (in_.scores != nullptr && !failed()) {
        state_.cache.rate(in_.scores, in_.scores_stride);
    }
    mem_ns_ += since(t);
    Counters & c = state_.counters;
    c.tokens += in_.n_tokens;
    c.evictions += state_.cache.evictions() - state_.evictions_counted;
    state_.evictions_counted = state_.cache.evictions();
    c.predictor_ns += in_.predictor_ns;
    c.io_ns += io_ns_;
    c.mem_ns += mem_ns_;
    const uint64_t all = since(start_);
    c.compute_ns += all - std::min(all, io_ns_ + mem_ns_);
    lock_.unlock();
}

// Computes a working set in as few parts as the cache allows, in the order of neurons.
void FfnRun::run_waves() {
    const uint32_t n = uint32_t(session().selection.size());
    uint32_t first = 0;
    while (first < n) {
        if (ith_ == 0) {
            const Clock::time_point t = Clock::now();
            session().wave_end = plan_wave(first);
            mem_ns_ += since(t);
            submit_misses();
            if (session().wave_end == n) { // before, the next layer's reads would delay the next wave's
                look_ahead();
            }
            state_.counters.waves += session().wave_end < n;
        }
        barrier();
        const uint32_t end = session().wave_end;
        compute_items(first, end - first, end - first);
        if (ith_ == 0) {
            drain();
        }
        barrier();
        if (failed()) {
            return;
        }
        accumulate(first, end);
        barrier();
        if (ith_ == 0 && end < n) {
            release_wave(first, end);
        }
        first = end;
    }
}

void FfnRun::run_stream() {
    const uint32_t n_ff = state_.layout.n_ff, per_chunk = chunk_neurons();
    const std::vector<Selected> & selection = session().selection;
    if (ith_ == 0) {
        for (uint32_t c = 0; c < uint32_t(stream_buffers); ++c) {
            submit_chunk(c);
        }
        session().reader->flush();
        state_.counters.streamed += 1;
    }
    uint32_t first = 0;
    for (uint32_t chunk = 0; chunk * uint64_t(per_chunk) < n_ff; ++chunk) {
        const uint64_t chunk_end = (chunk + 1) * uint64_t(per_chunk);
        uint32_t end = first;
        while (end < selection.size() && selection[end].neuron < chunk_end) {
            ++end;
        }
        if (ith_ == 0 && await_chunk(chunk)) {
            admit(chunk, first, end);
        }
        barrier();
        if (!failed()) {
            compute_items(first, end - first, end - first);
        }
        barrier();
        if (!failed()) {
            accumulate(first, end);
        }
        barrier();
        if (ith_ == 0) {
            submit_chunk(chunk + stream_buffers);
            session().reader->flush(); // the device reads on while this chunk's successor computes
        }
        first = end;
    }
}

void FfnRun::fail(Status status) {
    if (op_.status_.ok()) {
        op_.status_ = std::move(status);
    }
    session().failed.store(true, std::memory_order_release);
}

} // namespace gguf_flash
