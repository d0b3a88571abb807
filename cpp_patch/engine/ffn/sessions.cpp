// What running calls borrow from a model: scratch, and readers of its files.
#include "layer_state.h"
#include "watch.h"

#include <algorithm>

namespace gguf_flash {

namespace {

// Readers with scratch kept for the next call; more exist only while more calls run at once.
constexpr size_t kept_sessions = 2;

} // namespace

Model::Model() {
    sessions_.reserve(kept_sessions); // giving one back must not fail
}

Model::~Model() {
    watcher_.reset(); // before what it watches goes
    for (std::unique_ptr<Session> & session : sessions_) {
        if (session->pid != getpid()) {
            session.release(); // as in borrow(): in a fork's child there are no threads to join
        }
    }
}

// A ring is kept as full as may be: few reads would be done before attention is.
Status Model::prepare_ahead() {
    if (!settings_.lookahead || layout_.select != Select::predictor || layers_.size() < 2) {
        return {};
    }
    Result<std::unique_ptr<Reader>> reader =
        make_reader(settings_.reader, { std::max(settings_.depth, ring_depth), settings_.threads() }, faults_);
    if (!reader.ok()) {
        return reader.status();
    }
    ahead_ = std::make_unique<Ahead>(std::move(reader.value()));
    return {};
}

Result<std::unique_ptr<Session>> Model::borrow() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        while (!sessions_.empty()) {
            std::unique_ptr<Session> session = std::move(sessions_.back());
            sessions_.pop_back();
            if (session->pid == getpid()) {
                return session;
            }
            session.release(); // its threads and ring are the parent's; ending them here would hang
        }
    }
    Result<std::unique_ptr<Reader>> reader = make_reader(
        settings_.reader, { settings_.depth != 0 ? settings_.depth : ring_depth, settings_.threads() }, faults_);
    if (!reader.ok()) {
        return reader.status();
    }
    std::unique_ptr<Session> session(new Session(std::move(reader.value())));
    // A session beyond those that are kept serves one call: registering would cost more than it saves.
    session->enlists = enlisted_.fetch_add(1) < kept_sessions;
    session->enlisted = std::shared_ptr<void>(nullptr, [this](void *) { --enlisted_; });
    return session;
}

void Model::drop_sessions() {
    std::unique_ptr<Session> dropped[kept_sessions]; // destroyed without the lock: a reader waits for its threads
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::unique_ptr<Session> & session : dropped) {
        if (!sessions_.empty()) {
            session = std::move(sessions_.back());
            sessions_.pop_back();
            if (session->pid != getpid()) {
                session.release(); // as in borrow()
            }
        }
    }
}

void Model::give_back(std::unique_ptr<Session> session) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (sessions_.size() < kept_sessions) {
        sessions_.push_back(std::move(session));
    }
}

} // namespace gguf_flash
