/** Conversation: the turns of one conversation, and the messages sent to the server. Conversations: all of them, kept in the
    browser's storage. */

const MAX_CONVERSATIONS = 50; // the oldest are dropped
const MAX_TITLE_CHARS = 60;
const NEW_TITLE = "New conversation";

export class Conversation {
  constructor(id, turns = []) {
    Object.assign(this, { id, turns });
  }

  get title() {
    const question = this.turns
      .find(({ role }) => role === "user")
      ?.content.trim()
      .replace(/\s+/g, " ");
    return question ? question.slice(0, MAX_TITLE_CHARS) : NEW_TITLE;
  }

  get last() {
    return this.turns.at(-1);
  }

  /** Add a user turn and return the empty answer to it. */
  addQuestion(text) {
    this.turns.push({ role: "user", content: text });
    return this.addAnswer();
  }

  /** Return an empty answer in place of the last one. */
  replaceAnswer() {
    if (this.last?.role === "assistant") this.turns.pop();
    return this.addAnswer();
  }

  /** Return an empty answer at the end. After an answer with tool calls, it is the answer to their results. */
  addAnswer() {
    const answer = {
      role: "assistant",
      content: "",
      reasoning: "",
      tools: [],
      ending: "open",
      error: null,
      metrics: {},
    };
    this.turns.push(answer);
    return answer;
  }

  /** Remove a question and everything after it. */
  cutBefore(turn) {
    this.turns.splice(this.turns.indexOf(turn));
  }

  /** Return the messages of a request. A question whose request failed without an answer is left out; the page shows it as
      failed. Consecutive messages of one role are joined, because some chat templates require alternating roles. */
  messages(system) {
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    for (const [i, turn] of this.turns.entries()) {
      if (hasResults(turn)) messages.push(...toolMessages(turn, i));
      else if (turn.content && !isFailed(this.turns[i + 1])) addMessage(messages, turn);
    }
    return messages;
  }
}

function addMessage(messages, { role, content }) {
  const previous = messages.at(-1);
  if (previous?.role === role && !previous.tool_calls) previous.content += `\n\n${content}`;
  else messages.push({ role, content });
}

const isFailed = (turn) =>
  turn?.role === "assistant" && turn.ending === "failed" && !turn.content && !turn.tools.length;

/** Return whether an answer called tools and all have a result. */
export const hasResults = (turn) =>
  Boolean(turn?.tools?.length) && turn.tools.every(({ result }) => result !== undefined);

function toolMessages({ content, tools }, i) {
  const id = (tool, n) => tool.id || `call_${i}_${n}`;
  const calls = tools.map((tool, n) => ({
    id: id(tool, n),
    type: "function",
    function: { name: tool.name, arguments: tool.arguments },
  }));
  const results = tools.map((tool, n) => ({ role: "tool", tool_call_id: id(tool, n), content: tool.result }));
  return [{ role: "assistant", content, tool_calls: calls }, ...results];
}

export class Conversations {
  constructor(storage, key) {
    Object.assign(this, { storage, key });
    const { current, items } = load(storage, key);
    this.items = items.map(({ id, turns }) => new Conversation(id, turns));
    this.current = this.items.find(({ id }) => id === current) ?? this.items[0] ?? this.create();
  }

  /** Start a new conversation, or return to the one that is still empty. */
  create() {
    this.current = this.items.find(({ turns }) => !turns.length) ?? new Conversation(newId());
    if (!this.items.includes(this.current)) this.items.unshift(this.current);
    return this.current;
  }

  select(id) {
    this.current = this.items.find((item) => item.id === id) ?? this.current;
    this.save();
  }

  remove(conversation) {
    this.items = this.items.filter((item) => item !== conversation);
    if (this.current === conversation) this.current = this.items[0] ?? this.create();
    this.save();
  }

  restore(conversation) {
    this.items.unshift(conversation);
    this.current = conversation;
    this.save();
  }

  /** Save all conversations. If the browser's storage is full, drop the oldest; return false if that does not help. */
  save() {
    this.items = this.items.slice(0, MAX_CONVERSATIONS);
    for (let kept = this.items.length; kept > 0; kept -= 1) {
      const items = this.items.filter((item, i) => i < kept || item === this.current);
      try {
        this.storage.setItem(
          this.key,
          JSON.stringify({ current: this.current.id, items: items.map(({ id, turns }) => ({ id, turns })) }),
        );
        return true;
      } catch {
        // too large: try with fewer
      }
    }
    return false;
  }
}

const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function load(storage, key) {
  try {
    const { current, items } = JSON.parse(storage.getItem(key));
    // An answer that is still open in storage was interrupted when its page was closed.
    const closed = (turn) => (turn.ending === "open" ? { ...turn, ending: "stopped" } : turn);
    return { current, items: items.map(({ id, turns }) => ({ id, turns: turns.map(closed) })) };
  } catch {
    return { current: "", items: [] };
  }
}
