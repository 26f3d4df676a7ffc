/** A reply as it grows: chunks of either kind of stream are folded into one message, and timed. */

/** A message that nobody has written yet. */
export const emptyReply = () => ({
  role: "assistant",
  content: "",
  reasoning: "",
  tool_calls: [],
  tokens: [],
  stats: {},
});

/** Folds chunks into `message`. `now` in milliseconds, from a clock that never goes back. */
export class Reply {
  constructor(message, now) {
    this.message = message;
    this.begun = now;
    this.first = null;
    this.last = null;
    this.chunks = 0;
  }

  add(event, now) {
    if (event.usage) this.count(event.usage);
    const choice = event.choices?.[0];
    if (!choice) return;
    const has = "text" in choice ? this.addText(choice) : this.addDelta(choice);
    if (choice.finish_reason) this.message.stats.finish = choice.finish_reason;
    if (has) this.time(now);
  }

  /** Tokens per second of this reply until now; null while there are too few. */
  rate() {
    const seconds = (this.last - this.first) / 1000;
    const tokens = this.message.stats.tokens ?? this.chunks;
    return tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
  }

  /** Write down what is known; also for a reply that was stopped. */
  close(wasStopped = false) {
    const { stats } = this.message;
    stats.first_ms = this.first === null ? null : this.first - this.begun;
    stats.rate = this.rate();
    stats.tokens ??= this.chunks;
    if (wasStopped) stats.finish = "stopped";
  }

  addDelta({ delta = {}, logprobs }) {
    const { message } = this;
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    message.content += delta.content ?? "";
    message.reasoning += reasoning;
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    for (const one of logprobs?.content ?? []) message.tokens.push(chatToken(one));
    return Boolean(delta.content || reasoning || delta.tool_calls?.length || logprobs?.content?.length);
  }

  addText({ text, logprobs }) {
    this.message.content += text;
    logprobs?.tokens?.forEach((token, i) => {
      const top = Object.entries(logprobs.top_logprobs?.[i] ?? {});
      this.message.tokens.push(scored(token, logprobs.token_logprobs[i], top));
    });
    return Boolean(text || logprobs?.tokens?.length);
  }

  addCall({ index = 0, id, function: asked = {} }) {
    const calls = this.message.tool_calls;
    calls[index] ??= { id: "", name: "", arguments: "" };
    if (id) calls[index].id = id;
    calls[index].name += asked.name ?? "";
    calls[index].arguments += asked.arguments ?? "";
  }

  count(usage) {
    const { stats } = this.message;
    stats.tokens = usage.completion_tokens;
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }

  time(now) {
    this.first ??= now;
    this.last = now;
    this.chunks += 1;
  }
}

const chatToken = (one) =>
  scored(
    one.token,
    one.logprob,
    (one.top_logprobs ?? []).map((t) => [t.token, t.logprob]),
  );

/** A token, its probability, and what else could have stood there, most likely first. */
function scored(text, logprob, top) {
  const others = top.map(([other, value]) => ({ text: other, p: Math.exp(value) }));
  return { text, p: Math.exp(logprob), top: others.sort((a, b) => b.p - a.p) };
}
