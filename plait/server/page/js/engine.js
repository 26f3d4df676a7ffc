/** The engine as it is now, from /metrics, once a second while somebody looks. */

import { askText } from "./api.js";
import { make } from "./dom.js";
import { Bar, Plot, bytes, time, whole } from "./plot.js";
import { between, buckets, byLabel, parse, quantile, total } from "./prometheus.js";

const EVERY_MS = 1000,
  KEPT = 120,
  WINDOW = 10; // seconds: between scrapes, shown, behind each latency
const LATENCIES = [
  ["Time to first token", "plait_time_to_first_token_seconds"],
  ["Between tokens", "plait_inter_token_latency_seconds"],
  ["Step", "plait_step_seconds"],
];
const CAUSES = {
  hit: "found",
  new: "never seen",
  short: "too short",
  no_snapshot: "no snapshot",
  window: "outside the window",
  evicted: "evicted",
  off: "cache off",
};

export class Engine {
  /** `onSample({running, waiting, rate})` after each scrape. */
  constructor(node, onSample) {
    this.node = node;
    this.onSample = onSample;
    this.scrapes = []; // {at, scrape}, oldest first
    this.points = []; // what the plots show, one per scrape
    this.isWatched = false;
    this.timer = null;
    this.build();
  }

  /** Look, or stop looking. What was seen stays, with a gap. */
  watch(isWatched) {
    if (isWatched === this.isWatched) return;
    this.isWatched = isWatched;
    clearTimeout(this.timer);
    if (isWatched) this.turn();
  }

  async turn() {
    if (!document.hidden) await this.scrape();
    if (this.isWatched) this.timer = setTimeout(() => this.turn(), EVERY_MS);
  }

  async scrape() {
    let text;
    try {
      text = await askText("metrics");
    } catch (error) {
      this.status.textContent = error.message;
      this.status.hidden = false;
      return;
    }
    this.status.hidden = true;
    this.take({ at: performance.now(), scrape: parse(text) });
  }

  take(latest) {
    const before = this.scrapes.at(-1);
    const isRestarted =
      before && total(latest.scrape, "plait_steps_total") < total(before.scrape, "plait_steps_total");
    if (isRestarted) this.scrapes = [];
    this.scrapes.push(latest);
    if (this.scrapes.length > KEPT) this.scrapes.shift();
    if (!before || isRestarted) this.points.push(null);
    else this.points.push(this.measure(before, latest));
    if (this.points.length > KEPT) this.points.shift();
    this.show(latest.scrape);
  }

  measure(before, latest) {
    const seconds = (latest.at - before.at) / 1000;
    const grown = (name) => total(latest.scrape, name) - total(before.scrape, name);
    const older = this.scrapes.at(-1 - WINDOW) ?? this.scrapes[0];
    const steps = grown("plait_steps_total");
    const computed = grown("plait_prompt_tokens_total") - grown("plait_cached_tokens_total");
    return {
      output: grown("plait_output_tokens_total") / seconds,
      prompt: Math.max(0, computed) / seconds,
      batch: steps ? grown("plait_step_tokens_sum") / steps : null,
      steps: steps / seconds,
      running: total(latest.scrape, "plait_requests_running"),
      latencies: LATENCIES.map(([, name]) => {
        const found = between(buckets(latest.scrape, name), buckets(older.scrape, name));
        return [quantile(found, 0.5), quantile(found, 0.95)];
      }),
    };
  }

  build() {
    this.status = make("p", { class: "notice", role: "status", hidden: true });
    this.numbers = {};
    const figure = (key, name, title) => {
      this.numbers[key] = make("strong", { class: "num" }, "–");
      return make(
        "div",
        { class: "figure", title },
        this.numbers[key],
        make("span", { class: "small quiet" }, name),
      );
    };
    this.rates = new Plot(
      "Tokens per second",
      [
        { name: "output", kind: "a" },
        { name: "prompt", kind: "b" },
      ],
      (value) => (value < 10 ? value.toFixed(1) : whole(value)),
      KEPT,
    );
    this.latencies = LATENCIES.map(
      ([name]) =>
        new Plot(
          name,
          [
            { name: "p50", kind: "b" },
            { name: "p95", kind: "c" },
          ],
          time,
          KEPT,
        ),
    );
    this.blocks = new Bar("Blocks", [
      { name: "held", kind: "a" },
      { name: "cached", kind: "b" },
      { name: "free", kind: "rest" },
    ]);
    this.slots = new Bar("Slots and snapshots", [
      { name: "held", kind: "a" },
      { name: "cached", kind: "b" },
      { name: "free", kind: "rest" },
    ]);
    this.host = make("dd", { class: "num" });
    this.causes = make("div", { class: "causes" });
    this.shared = make("strong", { class: "num" }, "–");
    this.totals = make("dl", { class: "totals" });
    this.node.replaceChildren(
      this.status,
      section(
        "Now",
        make(
          "div",
          { class: "figures" },
          figure("running", "running", "Sequences that run"),
          figure("waiting", "waiting", "Sequences that wait for room"),
          figure("batch", "tokens/step", "Tokens computed in each step, lately"),
          figure("steps", "steps/s", "Passes through the model"),
        ),
        this.rates.node,
      ),
      section("Latency, the last ten seconds", ...this.latencies.map((plot) => plot.node)),
      section(
        "Memory",
        this.blocks.node,
        this.slots.node,
        make(
          "dl",
          { class: "totals" },
          make("div", {}, make("dt", {}, "Swapped out to host memory"), this.host),
        ),
      ),
      section(
        "Prefix cache",
        make("p", { class: "small" }, this.shared, " of prompt tokens were found, not computed"),
        this.causes,
      ),
      section("Since the start", this.totals),
    );
  }

  show(scrape) {
    const point = this.points.at(-1),
      states = (name) => byLabel(scrape, name, "state");
    const running = total(scrape, "plait_requests_running"),
      waiting = total(scrape, "plait_requests_waiting");
    this.numbers.running.textContent = whole(running);
    this.numbers.waiting.textContent = whole(waiting);
    this.numbers.batch.textContent = point?.batch ? point.batch.toFixed(point.batch < 10 ? 1 : 0) : "–";
    this.numbers.steps.textContent = point ? whole(point.steps) : "–";
    const line = (pick) => this.points.map((one) => (one ? pick(one) : null));
    this.rates.show([line((one) => one.output), line((one) => one.prompt)]);
    this.latencies.forEach((plot, i) =>
      plot.show([line((one) => one.latencies[i][0]), line((one) => one.latencies[i][1])]),
    );
    this.blocks.show(states("plait_blocks"));
    this.slots.show(states("plait_slots"));
    this.host.textContent = bytes(total(scrape, "plait_host_saved_bytes"));
    this.showCache(scrape);
    this.showTotals(scrape);
    this.onSample({ running, waiting, rate: point?.output ?? 0 });
  }

  showCache(scrape) {
    const asked = total(scrape, "plait_prefix_cache_asked_tokens_total");
    const hit = total(scrape, "plait_prefix_cache_hit_tokens_total");
    this.shared.textContent = asked ? `${((100 * hit) / asked).toFixed(0)} %` : "–";
    const counts = byLabel(scrape, "plait_prefix_cache_lookups_total", "cause");
    const most = Math.max(...Object.values(counts), 1);
    const rows = Object.entries(CAUSES)
      .filter(([cause]) => counts[cause] > 0)
      .map(([cause, name]) => {
        const bar = make("span", { class: cause === "hit" ? "meter a" : "meter" });
        bar.style.setProperty("--share", String(counts[cause] / most));
        return make(
          "div",
          { class: "cause" },
          make("span", {}, name),
          bar,
          make("span", { class: "num" }, whole(counts[cause])),
        );
      });
    this.causes.replaceChildren(...rows);
  }

  showTotals(scrape) {
    const drafted = total(scrape, "plait_drafted_tokens_total"),
      accepted = total(scrape, "plait_accepted_tokens_total");
    const rows = [
      ["Output tokens", whole(total(scrape, "plait_output_tokens_total"))],
      ["Prompt tokens", whole(total(scrape, "plait_prompt_tokens_total"))],
      ["Steps", whole(total(scrape, "plait_steps_total"))],
      ...counted(byLabel(scrape, "plait_requests_total", "finish_reason"), "Replies ended by "),
      ...counted(byLabel(scrape, "plait_preemptions_total", "kind"), "Preempted by "),
    ];
    if (drafted) rows.push(["Guesses that were right", `${((100 * accepted) / drafted).toFixed(0)} %`]);
    for (const [name, metric] of [
      ["Failed steps", "plait_failed_steps_total"],
      ["Repairs", "plait_repairs_total"],
      ["Engines replaced", "plait_engine_restarts_total"],
    ]) {
      if (total(scrape, metric)) rows.push([name, whole(total(scrape, metric))]);
    }
    this.totals.replaceChildren(
      ...rows.map(([name, value]) =>
        make("div", {}, make("dt", {}, name), make("dd", { class: "num" }, value)),
      ),
    );
  }
}

const counted = (counts, before) =>
  Object.entries(counts)
    .filter(([, count]) => count)
    .map(([name, count]) => [before + name, whole(count)]);

const section = (title, ...nodes) => make("section", {}, make("h3", {}, title), ...nodes);
