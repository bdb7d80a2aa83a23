/** Conversation: the turns so far, kept in the browser's storage, and what of them the server is sent. */

const KEY = "emberline.conversation";

export class Conversation {
  constructor(storage) {
    this.storage = storage;
    this.turns = load(storage);
  }

  get last() {
    return this.turns.at(-1);
  }

  /** A user's turn and the answer to it, which is still to be filled. */
  ask(text) {
    this.turns.push({ role: "user", content: text });
    return this.answer();
  }

  answer() {
    if (this.last?.role === "assistant") this.turns.pop();
    const answer = { role: "assistant", content: "", reasoning: "", tools: [], ending: "open", error: null, metrics: {} };
    this.turns.push(answer);
    return answer;
  }

  /** Wire messages. A question whose request failed before any answer is left out: it stays on the page, marked. Neighbours of one role (a question whose answer never came) are joined: some templates insist on turns. */
  messages(system) {
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    for (const [i, { role, content }] of this.turns.entries()) {
      if (!content || isFailed(this.turns[i + 1])) continue;
      const previous = messages.at(-1);
      if (previous?.role === role) previous.content += `\n\n${content}`;
      else messages.push({ role, content });
    }
    return messages;
  }

  replace(turns) {
    const before = this.turns;
    this.turns = turns;
    this.save();
    return before;
  }

  /** False when the browser's storage has no room. */
  save() {
    try {
      this.storage.setItem(KEY, JSON.stringify(this.turns));
      return true;
    } catch {
      return false;
    }
  }
}

const isFailed = (turn) => turn?.role === "assistant" && turn.ending === "failed" && !turn.content;

function load(storage) {
  try {
    const turns = JSON.parse(storage.getItem(KEY)) ?? [];
    // An answer still open in storage belongs to a page that was closed under it.
    return turns.map((turn) => (turn.ending === "open" ? { ...turn, ending: "stopped" } : turn));
  } catch {
    return [];
  }
}
