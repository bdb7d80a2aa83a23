/** The server's HTTP API as the page uses it. Every failure becomes a WireError. */

export class WireError extends Error {
  constructor(title, message, { status = 0, retryAfter = null, param = null } = {}) {
    super(message);
    Object.assign(this, { title, status, retryAfter, param });
  }

  toJSON() {
    return { title: this.title, message: this.message, status: this.status, retryAfter: this.retryAfter };
  }
}

const CHANGE_TIMEOUT_MS = 90_000; // the server waits 60 s for requests that use the model
const TITLES = {
  context_length_exceeded: "The conversation is longer than the model's context",
  deadline_exceeded: "The request timed out",
  engine_failed: "The engine failed",
  engine_unavailable: "The engine is not ready",
  model_not_found: "The server does not have this model",
  400: "The server rejected the request",
  401: "This server requires an API key",
  413: "The conversation is too long to send",
  429: "The server is busy",
};

export const stats = (key) => getJSON("stats", bearer(key));

export const bearer = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** The models of a server at run time. `key()` returns its admin key. */
export class ModelManagement {
  constructor(key) {
    this.key = key;
  }

  /** Return { served, cached, pulling, catalogue, available_bytes }. */
  list() {
    return getJSON("admin/models", bearer(this.key()));
  }

  /** Pull or load a model. Yields { status, completed, total }; the server ends a download without progress. */
  async *follow(action, model, signal) {
    const response = await this.post(action, { model }, signal);
    for await (const line of readLines(response.body)) {
      const report = JSON.parse(line || "{}");
      if (report.error) throw failure(report.error);
      yield report;
      if (report.status === "success") return;
    }
    throw connectionLost();
  }

  async unload(model) {
    await this.post("unload", { model }, AbortSignal.timeout(CHANGE_TIMEOUT_MS));
  }

  async remove(model) {
    await this.post("remove", { model }, AbortSignal.timeout(CHANGE_TIMEOUT_MS));
  }

  post(action, body, signal) {
    return send(`admin/models/${action}`, bearer(this.key()), { method: "POST", body: JSON.stringify(body), signal });
  }
}

/** Where chats are sent. */
export class Endpoint {
  /** `headers()` returns the headers of a request; `readDetails(headers)` returns what a reply's headers contain, as JSON. */
  constructor({ prefix = "v1", headers, readDetails = () => null }) {
    Object.assign(this, { prefix, headers, readDetails });
  }

  /** Return [{ id, max_model_len, default_sampling_params, ... }] of chat models. Only Emberline servers report the kind of a model. */
  async models() {
    return (await getJSON(`${this.prefix}/models`, this.headers())).data.filter(({ kind = "chat" }) => kind === "chat");
  }

  /** Yield the chunks of one streamed chat completion. Leaving the loop or aborting the signal cancels the request. */
  async *chat(body, signal, onreply) {
    const request = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await send(`${this.prefix}/chat/completions`, this.headers(), {
      method: "POST",
      body: JSON.stringify(request),
      signal,
    });
    onreply(response.headers);
    let ended = false;
    for await (const data of events(response.body, signal)) {
      if ((ended ||= data === "[DONE]")) continue; // read to the end: leaving earlier would be logged as a disconnect
      const chunk = JSON.parse(data);
      if (chunk.error) throw failure(chunk.error);
      yield chunk;
    }
    if (!ended) throw connectionLost();
  }
}

/** Where chats with an engine are sent, which also knows the sizes of its models. */
export class EngineEndpoint extends Endpoint {
  /** Return the models with `parameter_size`, such as "134.5M"; "" if it is not known. */
  async models() {
    const [models, sizes] = await Promise.all([super.models(), this.sizes().catch(() => new Map())]);
    return models.map((model) => ({ ...model, parameter_size: sizes.get(model.id) ?? "" }));
  }

  async sizes() {
    const { models } = await getJSON("api/tags", this.headers());
    return new Map(models.map(({ name, details }) => [name.replace(/:latest$/, ""), details.parameter_size]));
  }
}

async function getJSON(path, headers) {
  return (await send(path, headers, { cache: "no-store", signal: AbortSignal.timeout(5000) })).json();
}

async function send(path, headers, options) {
  let response;
  try {
    response = await fetch(path, { headers: { "Content-Type": "application/json", ...headers }, ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new WireError("The server does not respond", "Check that it is running, or start it with: emberline serve");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw failure(error ?? { message: response.statusText }, response.status, response.headers.get("Retry-After"));
}

/** Yield the lines of a stream of text, as they arrive. */
export async function* readLines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (pending + decoder.decode(value, { stream: true })).split("\n");
      pending = lines.pop();
      yield* lines;
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream may be broken already
  }
}

export async function* events(stream, signal) {
  const reader = stream.getReader(); // not piped through a decoder: a broken pipe drops the data in it
  const decoder = new TextDecoder();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (pending + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      pending = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw connectionLost();
  } finally {
    reader.cancel().catch(() => {}); // the stream may be broken already
  }
}

function failure(error, status = 0, retryAfter = null) {
  const field = error.param ? `: ${error.param}` : "";
  const details = { status, param: error.param, retryAfter: retryAfter === null ? null : Number(retryAfter) || null };
  return new WireError(
    `${TITLES[error.code] ?? TITLES[status] ?? "Server error"}${field}`,
    error.message ?? "The server gave no reason.",
    details,
  );
}

const connectionLost = () => new WireError("The connection was lost", "The answer above is incomplete.");
