/** Conversation: the turns so far, kept in the browser's storage, and the messages sent to the server. */

const KEY = "emberline.conversation";

export class Conversation {
  constructor(storage) {
    this.storage = storage;
    this.turns = load(storage);
  }

  get last() {
    return this.turns.at(-1);
  }

  /** Add a user turn and return the empty answer to it. */
  addQuestion(text) {
    this.turns.push({ role: "user", content: text });
    return this.addAnswer();
  }

  addAnswer() {
    if (this.last?.role === "assistant") this.turns.pop();
    const answer = { role: "assistant", content: "", reasoning: "", tools: [], ending: "open", error: null, metrics: {} };
    this.turns.push(answer);
    return answer;
  }

  /** Return the messages of a request. A question whose request failed without an answer is left out; the page shows it as
      failed. Consecutive messages of one role are joined, because some chat templates require alternating roles. */
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
    const previous = this.turns;
    this.turns = turns;
    this.save();
    return previous;
  }

  /** Return false if the browser's storage is full. */
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
    // An answer that is still open in storage was interrupted when its page was closed.
    return turns.map((turn) => (turn.ending === "open" ? { ...turn, ending: "stopped" } : turn));
  } catch {
    return [];
  }
}
