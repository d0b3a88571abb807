#include "ahead.h"

#include "reads.h"

#include <algorithm>

namespace gguf_flash {

struct Ahead::Piece {
    ReadOp op;
    std::vector<iovec> segments;
    std::vector<uint32_t> neurons;
    LayerState * state = nullptr;
};

Ahead::Ahead(std::unique_ptr<Reader> reader) : reader_(std::move(reader)) {}

Ahead::~Ahead() {
    if (pid_ != getpid()) {
        reader_.release(); // its ring and its threads are the parent's
    }
}

void Ahead::read(LayerState & state, const std::vector<uint32_t> & neurons) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pid_ != getpid()) {
        leave_parent();
    }
    plan_runs(state, neurons, state.runs_ahead);
    for (ReadRun run : state.runs_ahead) {
        Piece & piece = spare_piece();
        piece.state = &state;
        piece.neurons.assign(neurons.begin() + run.first, neurons.begin() + run.first + run.count);
        if (reader_ == nullptr) {
            finish(piece, false);
            continue;
        }
        piece.segments.resize(std::max(piece.segments.size(), size_t(run_segments(neurons, run))));
        state.counters.bytes_read += describe_run(state, neurons, run, piece.segments.data(), piece.op);
        piece.op.owner = &piece;
        reader_->submit(&piece.op);
        ++in_flight_;
    }
    state.counters.requests += state.runs_ahead.size();
    if (reader_ != nullptr) {
        reader_->flush();
    }
}

void Ahead::take(LayerState & state, std::vector<Arrival> & arrived, bool wait) {
    arrived.clear();
    std::lock_guard<std::mutex> lock(mutex_);
    if (pid_ != getpid()) {
        leave_parent();
    }
    collect(false);
    if (state.arrived.empty() && wait) {
        collect(true);
    }
    arrived.swap(state.arrived);
}

void Ahead::collect(bool wait) {
    constexpr size_t batch = 64;
    ReadOp * done[batch];
    size_t n = batch;
    while (in_flight_ > 0 && n == batch) {
        n = wait ? reader_->wait(done, batch) : reader_->poll(done, batch);
        in_flight_ -= n;
        for (size_t i = 0; i < n; ++i) {
            finish(*static_cast<Piece *>(done[i]->owner), done[i]->error == 0);
        }
        wait = false;
    }
}

void Ahead::finish(Piece & piece, bool ok) {
    for (uint32_t neuron : piece.neurons) {
        piece.state->arrived.push_back({ neuron, ok });
    }
    spare_.push_back(&piece);
}

Ahead::Piece & Ahead::spare_piece() {
    if (spare_.empty()) {
        pieces_.push_back(std::make_unique<Piece>());
        return *pieces_.back();
    }
    Piece * piece = spare_.back();
    spare_.pop_back();
    return *piece;
}

// In a fork's child: the reads under way belong to the parent, and their bytes will not come here. From
// now on nothing is read ahead.
void Ahead::leave_parent() {
    reader_.release();
    pid_ = getpid();
    for (const std::unique_ptr<Piece> & piece : pieces_) {
        if (std::find(spare_.begin(), spare_.end(), piece.get()) == spare_.end()) {
            finish(*piece, false);
        }
    }
    in_flight_ = 0;
}

} // namespace gguf_flash
