/** What was said, read out of payloads of any dialect as far as it is text. The payload itself is shown besides. */

const text = (content) => {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content?.text ?? "";
  return content.map((part) => part.text ?? part.thinking ?? text(part.content ?? part.parts) ?? `[${part.type ?? "part"}]`).join("");
};
const turn = (role, content) => ({ role: String(role ?? "user"), text: text(content) });
const spoken = (turns) => turns.filter((each) => each.text);

export function questions(request) {
  if (!request || typeof request !== "object") return [];
  const system = request.system ?? request.instructions ?? request.systemInstruction?.parts;
  const asked = request.messages ?? request.contents ?? (Array.isArray(request.input) ? request.input : request.input ? [{ content: request.input }] : []);
  const turns = Array.isArray(asked) ? asked.filter((each) => each && typeof each === "object") : [];
  return spoken([turn("system", system), ...turns.map((each) => turn(each.role ?? each.type, each.content ?? each.parts ?? each.output))]);
}

export function answer(response) {
  if (!response) return [];
  if (typeof response === "string") return spoken([turn("assistant", events(response).map(piece).join(""))]);
  return spoken([turn("assistant", whole(response)), turn("error", response.error?.message)]);
}

function whole(reply) {
  if (reply.choices) return reply.choices.map(({ message, text: plain }) => text(message?.content ?? plain)).join("\n");
  if (reply.candidates) return reply.candidates.map(({ content }) => text(content?.parts)).join("\n");
  if (reply.output) return text(reply.output);
  return text(reply.content);
}

/** The text that one event of a stream adds. */
function piece(event) {
  if (event.error) return `\n[${event.error.message ?? "error"}]`;
  if (event.choices) return event.choices.map(({ delta, text: plain }) => text(delta?.content ?? plain)).join("");
  if (event.candidates) return whole(event);
  if (event.type === "content_block_delta") return event.delta?.text ?? "";
  return event.type === "response.output_text.delta" ? event.delta : "";
}

function events(stream) {
  const found = [];
  for (const line of stream.split("\n")) {
    if (!line.startsWith("data:")) continue;
    try {
      const event = JSON.parse(line.slice(5));
      if (event && typeof event === "object") found.push(event);
    } catch {
      // [DONE], or one that was cut off
    }
  }
  return found;
}
