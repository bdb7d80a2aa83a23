/** Extracts the text messages from request and reply payloads of any dialect. */

const text = (content) => {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content?.text ?? "";
  return content.map((part) => part.text ?? part.thinking ?? text(part.content ?? part.parts) ?? `[${part.type ?? "part"}]`).join("");
};
const message = (role, content) => ({ role: String(role ?? "user"), text: text(content) });
const nonEmpty = (messages) => messages.filter((each) => each.text);

export function requestMessages(request) {
  if (!request || typeof request !== "object") return [];
  const system = request.system ?? request.instructions ?? request.systemInstruction?.parts;
  const input = request.messages ?? request.contents ?? (Array.isArray(request.input) ? request.input : request.input ? [{ content: request.input }] : []);
  const turns = Array.isArray(input) ? input.filter((each) => each && typeof each === "object") : [];
  return nonEmpty([message("system", system), ...turns.map((each) => message(each.role ?? each.type, each.content ?? each.parts ?? each.output))]);
}

export function responseMessages(response) {
  if (!response) return [];
  if (typeof response === "string") return nonEmpty([message("assistant", events(response).map(eventText).join(""))]);
  return nonEmpty([message("assistant", replyText(response)), message("error", response.error?.message)]);
}

function replyText(reply) {
  if (reply.choices) return reply.choices.map(({ message: content, text: plain }) => text(content?.content ?? plain)).join("\n");
  if (reply.candidates) return reply.candidates.map(({ content }) => text(content?.parts)).join("\n");
  if (reply.output) return text(reply.output);
  return text(reply.content);
}

/** Return the text that one event of a stream adds. */
function eventText(event) {
  if (event.error) return `\n[${event.error.message ?? "error"}]`;
  if (event.choices) return event.choices.map(({ delta, text: plain }) => text(delta?.content ?? plain)).join("");
  if (event.candidates) return replyText(event);
  if (event.type === "content_block_delta") return event.delta?.text ?? "";
  return event.type === "response.output_text.delta" ? event.delta : "";
}

function events(stream) {
  const result = [];
  for (const line of stream.split("\n")) {
    if (!line.startsWith("data:")) continue;
    try {
      const event = JSON.parse(line.slice(5));
      if (event && typeof event === "object") result.push(event);
    } catch {
      // [DONE], or a truncated event
    }
  }
  return result;
}
