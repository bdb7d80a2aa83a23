/** The management API as the pages use it. Whatever goes wrong becomes an ApiError. */

const PATIENCE = 20_000; // ms
const MOST = 2000; // entries of a list that is shown as a whole

export class ApiError extends Error {
  constructor(message, { status = 0, code = "", param = null } = {}) {
    super(param && !message.includes(param) ? `${param}: ${message}` : message);
    Object.assign(this, { status, code, param });
  }
}

export class Api {
  constructor(token, account) {
    Object.assign(this, { token, account });
  }

  get headers() {
    return { "cf-aig-authorization": `Bearer ${this.token}` };
  }

  get(path, query = {}, signal = null) {
    const asked = Object.entries(query).filter(([, value]) => value !== "" && value != null);
    const tail = asked.length ? `?${new URLSearchParams(asked)}` : "";
    return this.send("GET", path + tail, undefined, signal);
  }

  async send(method, path, body = undefined, signal = null) {
    const limits = [AbortSignal.timeout(PATIENCE), signal].filter(Boolean);
    const request = { method, headers: { ...this.headers }, cache: "no-store", signal: AbortSignal.any(limits) };
    if (body !== undefined) {
      request.body = JSON.stringify(body);
      request.headers["content-type"] = "application/json";
    }
    const reply = await answered(`admin/accounts/${encodeURIComponent(this.account)}/${path}`, request, signal);
    return reply.json();
  }

  /** A list as a whole, page by page. */
  async all(path, signal = null) {
    const items = [];
    let after = "";
    do {
      const page = await this.get(path, { after, limit: 500 }, signal);
      items.push(...page.items);
      after = page.next;
    } while (after && items.length < MOST);
    return items;
  }
}

/** A reply that is not an error. `signal`: who waits for it may leave, which is no failure. */
export async function answered(url, request, signal) {
  let reply;
  try {
    reply = await fetch(url, request);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The gateway does not answer.");
  }
  if (reply.ok) return reply;
  const { error } = await reply.json().catch(() => ({}));
  throw new ApiError(error?.message ?? reply.statusText, { status: reply.status, code: error?.code, param: error?.param });
}

/** A part of a path. */
export const part = (text) => encodeURIComponent(text);
