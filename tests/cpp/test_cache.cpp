// NeuronCache against a plain model of the same rules, operation by operation.
#include "plain_cache.h"
#include "random_data.h"

#include <doctest/doctest.h>

#include <set>

using namespace gguf_flash;

namespace {

struct Pair {
    Pair(uint32_t n, uint32_t slots, Policy policy, uint32_t window)
        : n_neurons(n), n_slots(slots), cache(n, slots, policy, window), plain(slots, policy, window) {}

    void same() {
        std::set<int32_t> slots;
        for (uint32_t i = 0; i < n_neurons; ++i) {
            const int32_t slot = cache.slot(i);
            REQUIRE((slot != NeuronCache::none) == plain.has(i));
            if (slot != NeuronCache::none) {
                REQUIRE(slot >= 0);
                REQUIRE(slot < int32_t(n_slots));
                REQUIRE(slots.insert(slot).second); // nobody else's
            }
        }
        REQUIRE(cache.n_cached() == slots.size());
        REQUIRE(cache.n_cached() <= n_slots);
        REQUIRE(cache.evictions() == plain.evictions);
        REQUIRE(cache.has_free_slot() == (slots.size() < n_slots));
    }

    uint32_t n_neurons, n_slots;
    NeuronCache cache;
    PlainCache plain;
};

std::vector<Selected> random_selection(Random & random, uint32_t n_neurons, uint32_t n_tokens) {
    const uint32_t percent = random.pick<uint32_t>({ 0, 3, 10, 30, 60, 100 });
    std::vector<Selected> out;
    for (uint32_t i = 0; i < n_neurons; ++i) {
        if (random.chance(percent)) {
            out.push_back({ i, random.below(n_tokens) });
        }
    }
    return out;
}

// Frees room as an FFN call would: gives back something in use; sometimes takes it back or loses it.
void make_room(Pair & p, Random & random, const std::vector<Selected> & selection) {
    std::vector<uint32_t> held;
    for (const Selected & s : selection) {
        if (p.plain.has(s.neuron)) {
            held.push_back(s.neuron);
        }
    }
    const uint32_t neuron = random.pick(held);
    if (random.chance(10)) {
        p.cache.drop(neuron);
        p.plain.forget(neuron);
        return;
    }
    p.cache.release(neuron);
    p.plain.release(neuron);
    const uint32_t back = random.pick(held);
    if (random.chance(30) && p.plain.released(back)) {
        p.cache.protect(back);
        p.plain.protect(back);
    }
}

// Selected and not released: must survive whatever is acquired.
std::set<uint32_t> protected_now(const Pair & p, const std::vector<Selected> & selection, size_t taken) {
    std::set<uint32_t> out;
    for (size_t i = 0; i < selection.size(); ++i) {
        const uint32_t n = selection[i].neuron;
        if (i < taken && p.plain.has(n) && !p.plain.released(n)) {
            out.insert(n);
        }
    }
    return out;
}

void tick(Pair & p, Random & random) {
    const uint32_t n_tokens = random.chance(50) ? 1 : 1 + random.below(7);
    const std::vector<Selected> selection = random_selection(random, p.n_neurons, n_tokens);
    p.cache.begin(n_tokens);
    p.plain.begin(n_tokens);
    for (const Selected & s : selection) {
        REQUIRE((p.cache.slot(s.neuron) != NeuronCache::none) == p.plain.has(s.neuron));
        if (p.plain.has(s.neuron)) {
            p.cache.touch(s);
            p.plain.touch(s);
        }
    }
    for (size_t i = 0; i < selection.size();) {
        if (p.plain.has(selection[i].neuron)) {
            ++i;
            continue;
        }
        const std::set<uint32_t> before = protected_now(p, selection, i);
        const bool got = p.cache.acquire(selection[i]) != NeuronCache::none;
        REQUIRE(got == p.plain.acquire(selection[i]));
        p.same();
        for (uint32_t n : before) {
            REQUIRE(p.cache.slot(n) != NeuronCache::none);
        }
        if (got) {
            ++i;
        }
        if (!got || random.chance(20)) {
            make_room(p, random, selection);
        }
    }
    p.cache.end();
    p.plain.end();
    p.same();
}

} // namespace

TEST_CASE("cache: same hits, evictions and contents as the plain model") {
    for (Policy policy : { Policy::budget, Policy::window }) {
        for (uint32_t window : { 1u, 2u, 5u }) {
            for (uint32_t n_slots : { 1u, 2u, 7u, 20u, 39u, 40u }) {
                CAPTURE(int(policy));
                CAPTURE(window);
                CAPTURE(n_slots);
                Pair p(40, n_slots, policy, window);
                Random random(window * 100 + n_slots);
                for (int i = 0; i < 200; ++i) {
                    tick(p, random);
                }
            }
        }
    }
}

TEST_CASE("cache: the window is the last k tokens, whatever the ticks") {
    NeuronCache cache(10, 10, Policy::window, 2);
    auto run = [&](uint32_t n_tokens, const std::vector<Selected> & selection) {
        cache.begin(n_tokens);
        for (const Selected & s : selection) {
            cache.slot(s.neuron) == NeuronCache::none ? void(cache.acquire(s)) : cache.touch(s);
        }
        cache.end();
    };
    run(3, { { 0, 0 }, { 1, 1 }, { 2, 2 } });
    CHECK(cache.slot(0) == NeuronCache::none); // only the first of three tokens wanted it
    CHECK(cache.slot(1) != NeuronCache::none);
    CHECK(cache.slot(2) != NeuronCache::none);
    run(1, { { 5, 0 } });
    CHECK(cache.slot(1) == NeuronCache::none);
    CHECK(cache.slot(2) != NeuronCache::none);
    run(1, {});
    CHECK(cache.slot(2) == NeuronCache::none);
    CHECK(cache.slot(5) != NeuronCache::none);
    CHECK(cache.evictions() == 3);
}

TEST_CASE("cache: a slot taken from a released neuron protects its new owner") {
    NeuronCache cache(4, 2, Policy::budget, 1);
    cache.begin(1);
    cache.acquire({ 0, 0 });
    cache.acquire({ 1, 0 });
    cache.release(0);
    cache.release(0); // twice is once
    REQUIRE(cache.acquire({ 2, 0 }) != NeuronCache::none);
    cache.release(1);
    REQUIRE(cache.acquire({ 0, 0 }) != NeuronCache::none);
    CHECK(cache.acquire({ 3, 0 }) == NeuronCache::none); // 2 and 0 are both in use
    CHECK(cache.slot(0) != NeuronCache::none);
}

TEST_CASE("cache: a scan longer than the cache keeps most of it") {
    NeuronCache cache(100, 50, Policy::budget, 1);
    std::vector<Selected> all;
    for (uint32_t i = 0; i < 100; ++i) {
        all.push_back({ i, 0 });
    }
    uint32_t hits = 0;
    for (int round = 0; round < 10; ++round) {
        cache.begin(1);
        for (const Selected & s : all) {
            if (cache.slot(s.neuron) != NeuronCache::none) {
                cache.touch(s);
                hits += round > 0;
            }
        }
        for (const Selected & s : all) {
            if (cache.slot(s.neuron) == NeuronCache::none) {
                REQUIRE(cache.acquire(s) != NeuronCache::none);
            }
            cache.release(s.neuron);
        }
        cache.end();
    }
    CHECK(hits > 9 * 40);
}

namespace {

// What neuron_cache.h says of Policy::score, one token a tick.
struct PlainRatings {
    explicit PlainRatings(uint32_t slots) : n_slots(slots) {}

    void tick(const std::vector<float> & scores, const std::vector<Selected> & selection) {
        for (Selected s : selection) {
            while (cached.count(s.neuron) == 0 && cached.size() >= n_slots) {
                uint32_t victim = UINT32_MAX;
                for (uint32_t n : cached) {
                    const bool needed = std::any_of(selection.begin(), selection.end(),
                                                    [n](Selected other) { return other.neuron == n; });
                    if (!needed && (victim == UINT32_MAX || rating[n] < rating[victim])) {
                        victim = n;
                    }
                }
                cached.erase(victim);
            }
            cached.insert(s.neuron);
        }
        rating.resize(scores.size());
        for (size_t i = 0; i < scores.size(); ++i) {
            rating[i] = (rating[i] + scores[i]) / 2;
        }
    }

    uint32_t n_slots;
    std::set<uint32_t> cached;
    std::vector<float> rating;
};

} // namespace

TEST_CASE("cache: policy score evicts what has scored lowest of late") {
    constexpr uint32_t n = 60;
    for (uint32_t slots : { 20u, 33u, 60u }) {
        Random random(slots);
        NeuronCache cache(n, slots, Policy::score, 5);
        PlainRatings plain(slots);
        for (int tick = 0; tick < 400; ++tick) {
            std::vector<float> scores(n);
            std::vector<Selected> selection;
            for (uint32_t i = 0; i < n; ++i) {
                scores[i] = random.real() + (i + uint32_t(tick) / 20) % 6 * 0.2f;
                if (scores[i] > 1.2f && selection.size() < slots) {
                    selection.push_back({ i, 0 });
                }
            }
            cache.begin(1);
            uint32_t missing = 0;
            for (Selected s : selection) {
                cache.slot(s.neuron) != NeuronCache::none ? cache.touch(s) : void(++missing);
            }
            cache.expect(missing);
            for (Selected s : selection) {
                REQUIRE((cache.slot(s.neuron) != NeuronCache::none || cache.acquire(s) != NeuronCache::none));
            }
            cache.end();
            cache.rate(scores.data(), n);
            plain.tick(scores, selection);
            for (uint32_t i = 0; i < n; ++i) {
                REQUIRE((cache.slot(i) != NeuronCache::none) == (plain.cached.count(i) == 1));
            }
        }
        CHECK((cache.evictions() > 0) == (slots < n));
    }
}

TEST_CASE("cache: a look ahead takes no slot of its own, of a read under way, or of this tick") {
    Random random(4);
    for (Policy policy : { Policy::budget, Policy::window, Policy::score }) {
        NeuronCache cache(50, 16, policy, 2);
        std::set<uint32_t> pinned;
        for (int tick = 0; tick < 500; ++tick) {
            std::set<uint32_t> kept, fresh;
            cache.begin_ahead();
            const uint32_t first = random.below(40), most = random.below(12);
            for (uint32_t i = first; i < first + most; ++i) {
                if (cache.slot(i) != NeuronCache::none) {
                    cache.keep(i);
                    kept.insert(i);
                }
            }
            cache.expect(most);
            for (uint32_t i = first; i < first + most; ++i) {
                if (cache.slot(i) == NeuronCache::none && cache.acquire_ahead(i) != NeuronCache::none) {
                    fresh.insert(i);
                }
            }
            pinned.insert(fresh.begin(), fresh.end());
            for (const std::set<uint32_t> * there : { &kept, &fresh, &pinned }) {
                for (uint32_t i : *there) {
                    REQUIRE(cache.slot(i) != NeuronCache::none);
                }
            }
            const std::vector<uint32_t> waiting(pinned.begin(), pinned.end());
            for (uint32_t i : waiting) {
                if (random.chance(60)) {
                    cache.unpin(i);
                    pinned.erase(i);
                }
            }
            cache.begin(1);
            const Selected s = { random.below(50), 0 };
            if (cache.slot(s.neuron) != NeuronCache::none) {
                cache.touch(s);
            } else {
                cache.expect(1);
                REQUIRE((cache.acquire(s) != NeuronCache::none || pinned.size() >= 16));
            }
            cache.end();
            REQUIRE(cache.n_pinned() == pinned.size());
            for (uint32_t i : pinned) {
                REQUIRE(cache.slot(i) != NeuronCache::none);
                REQUIRE(cache.pinned(i));
            }
        }
    }
}
