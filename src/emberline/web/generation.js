/** Generation: fills one answer from a stream of chunks, and measures its latency and speed in this browser. */

import { WireError } from "./wire.js";

export class Generation {
  constructor(answer, body, endpoint) {
    Object.assign(this, { answer, body, endpoint });
    this.abort = new AbortController();
    this.pieces = 0; // chunks with text, which are nearly always one token each; an estimate until the usage arrives
  }

  stop() {
    this.abort.abort();
  }

  async run(onchange) {
    const { answer } = this;
    this.started = performance.now();
    try {
      const onreply = (headers) => (answer.details = this.endpoint.readDetails(headers));
      for await (const chunk of this.endpoint.chat(this.body, this.abort.signal, onreply)) {
        this.take(chunk);
        onchange();
      }
      answer.ending = answer.finish === "length" ? "length" : "complete";
    } catch (error) {
      answer.ending = this.abort.signal.aborted ? "stopped" : "failed";
      if (answer.ending === "failed") answer.error = errorJSON(error);
    }
    onchange();
  }

  take({ choices, usage }) {
    const choice = choices?.[0];
    if (choice?.finish_reason) this.answer.finish = choice.finish_reason;
    if (choice?.delta && this.append(choice.delta)) {
      this.pieces += 1;
      this.latest = performance.now();
      this.first ??= this.latest;
    }
    this.measure(usage);
  }

  append(delta) {
    const { answer } = this;
    answer.content += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) {
      const tool = (answer.tools[call.index] ??= { id: "", name: "", arguments: "" });
      tool.id ||= call.id ?? "";
      tool.name += call.function?.name ?? "";
      tool.arguments += call.function?.arguments ?? "";
    }
    return Boolean(delta.content || delta.reasoning_content || delta.tool_calls?.length);
  }

  measure(usage) {
    if (this.first === undefined) return;
    const { metrics } = this.answer;
    const tokens = usage?.completion_tokens ?? this.pieces;
    const decoding = (this.latest - this.first) / 1000;
    metrics.ttft = (this.first - this.started) / 1000;
    metrics.rate = tokens > 1 && decoding > 0 ? (tokens - 1) / decoding : null;
    metrics.completion = tokens;
    metrics.seconds = (this.latest - this.started) / 1000;
    metrics.exact = usage != null;
    if (usage) {
      metrics.prompt = usage.prompt_tokens;
      metrics.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      const details = usage.completion_tokens_details;
      metrics.accepted = details?.accepted_prediction_tokens ?? 0;
      metrics.drafted = metrics.accepted + (details?.rejected_prediction_tokens ?? 0);
    }
  }
}

const errorJSON = (error) => (error instanceof WireError ? error : new WireError("Error in this page", String(error))).toJSON();
