/** Program text that calls this server, for each client: pure functions from an address, a key and a request to text. */

const OPENAI_FIELDS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "max_tokens",
  "seed",
  "stream",
  "stop",
  "tools",
  "tool_choice",
  "response_format",
  "n",
  "logprobs",
]);
const KEY_VARIABLE = "EMBERLINE_API_KEY";
const NO_KEY = "no-key-needed"; // SDKs refuse an empty key

const shell = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;
const indent = (text, by) => text.replaceAll("\n", `\n${" ".repeat(by)}`);
const json = (value, by = 0) => indent(JSON.stringify(value, null, 2), by);
const hasEntries = (object) => Object.keys(object).length > 0;

/** `endpoint`: { base: URL that ends with /v1, key: text or "", headers: further headers }. */
export function curl(endpoint, body) {
  const headers = {
    "Content-Type": "application/json",
    ...(endpoint.key && { Authorization: `Bearer ${endpoint.key}` }),
    ...endpoint.headers,
  };
  const lines = Object.entries(headers).map(([name, value]) => `  -H ${shell(`${name}: ${value}`)} \\`);
  return [
    `curl ${shell(`${endpoint.base}/chat/completions`)} \\`,
    ...lines,
    `  -d ${shell(JSON.stringify(body, null, 2))}`,
  ].join("\n");
}

export function python(endpoint, body) {
  const named = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.fromEntries(
    Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name) && name !== "stream_options"),
  );
  const values = named.map(([name, value]) => `    ${name}=${indent(literal(value), 4)},`);
  if (hasEntries(extra)) values.push(`    extra_body=${indent(literal(extra), 4)},`);
  const headers = hasEntries(endpoint.headers ?? {}) ? `, default_headers=${literal(endpoint.headers)}` : "";
  const print = body.stream
    ? [
        "for chunk in reply:",
        "    if chunk.choices:",
        '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
      ]
    : ["print(reply.choices[0].message.content)"];
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(endpoint.base)}, api_key=${JSON.stringify(endpoint.key || NO_KEY)}${headers})`,
    "reply = client.chat.completions.create(",
    ...values,
    ")",
    ...print,
  ].join("\n");
}

/** Return a value as a Python literal. */
function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value))
    return value.length ? `[\n${value.map((each) => `    ${indent(literal(each), 4)},`).join("\n")}\n]` : "[]";
  if (typeof value !== "object") return JSON.stringify(value);
  const lines = Object.entries(value).map(
    ([name, each]) => `    ${JSON.stringify(name)}: ${indent(literal(each), 4)},`,
  );
  return lines.length ? `{\n${lines.join("\n")}\n}` : "{}";
}

/** Return [{ id, title, language, note, code }] for each client.

    `endpoint` is as above, with `anthropic` (the URL before /v1/messages) and `engine` (the URL of the engine). */
export function clients(endpoint, model) {
  const key = endpoint.key || NO_KEY;
  const headers = endpoint.headers ?? {};
  const body = { model, messages: [{ role: "user", content: "Name the capital of France." }], temperature: 0 };
  const withHeaders = (name) => (hasEntries(headers) ? `,\n  ${name}: ${json(headers, 2)}` : "");
  const exports = (variables) =>
    Object.entries(variables)
      .map(([name, value]) => `export ${name}=${shell(value)}`)
      .join("\n");
  const customHeaders = Object.entries(headers)
    .map(([name, value]) => `${name}: ${value}`)
    .join("\n");
  const opencode = {
    $schema: "https://opencode.ai/config.json",
    model: `emberline/${model}`,
    provider: {
      emberline: {
        npm: "@ai-sdk/openai-compatible",
        name: "Emberline",
        options: { baseURL: endpoint.base, apiKey: key, ...(hasEntries(headers) && { headers }) },
        models: { [model]: { name: model } },
      },
    },
  };
  const codex = [
    `model = ${JSON.stringify(model)}`,
    'model_provider = "emberline"',
    "",
    "[model_providers.emberline]",
    'name = "Emberline"',
    `base_url = ${JSON.stringify(endpoint.base)}`,
    `env_key = "${KEY_VARIABLE}"`,
    'wire_api = "responses"',
    ...(hasEntries(headers)
      ? [
          `http_headers = { ${Object.entries(headers)
            .map(([name, value]) => `${JSON.stringify(name)} = ${JSON.stringify(value)}`)
            .join(", ")} }`,
        ]
      : []),
  ];
  return [
    { id: "curl", title: "curl", language: "sh", note: "", code: curl(endpoint, body) },
    {
      id: "openai-python",
      title: "OpenAI, Python",
      language: "python",
      note: "pip install openai",
      code: python(endpoint, body),
    },
    {
      id: "openai-js",
      title: "OpenAI, JavaScript",
      language: "js",
      note: "npm install openai",
      code: `import OpenAI from "openai";

const client = new OpenAI({
  baseURL: ${JSON.stringify(endpoint.base)},
  apiKey: ${JSON.stringify(key)}${withHeaders("defaultHeaders")},
});
const reply = await client.chat.completions.create(${json(body)});
console.log(reply.choices[0].message.content);`,
    },
    {
      id: "anthropic",
      title: "Anthropic, Python",
      language: "python",
      note: "pip install anthropic",
      code: `from anthropic import Anthropic

client = Anthropic(
    base_url=${JSON.stringify(endpoint.anthropic)},
    auth_token=${JSON.stringify(key)},${hasEntries(headers) ? `\n    default_headers=${indent(literal(headers), 4)},` : ""}
)
reply = client.messages.create(
    model=${JSON.stringify(model)},
    max_tokens=256,
    messages=[{"role": "user", "content": "Name the capital of France."}],
)
print(reply.content[0].text)`,
    },
    {
      id: "claude-code",
      title: "Claude Code",
      language: "sh",
      note: "npm install -g @anthropic-ai/claude-code",
      code: `${exports({
        ANTHROPIC_BASE_URL: endpoint.anthropic,
        ANTHROPIC_AUTH_TOKEN: key,
        ANTHROPIC_MODEL: model,
        ANTHROPIC_DEFAULT_HAIKU_MODEL: model,
        ...(customHeaders && { ANTHROPIC_CUSTOM_HEADERS: customHeaders }),
      })}\nclaude`,
    },
    {
      id: "codex",
      title: "Codex",
      language: "toml",
      note: `in ~/.codex/config.toml; then: export ${KEY_VARIABLE}=${shell(key)}; codex`,
      code: codex.join("\n"),
    },
    {
      id: "opencode",
      title: "opencode",
      language: "json",
      note: "in opencode.json of your project; then: opencode",
      code: json(opencode),
    },
    {
      id: "ai-sdk",
      title: "AI SDK",
      language: "js",
      note: "npm install ai @ai-sdk/openai-compatible",
      code: `import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const emberline = createOpenAICompatible({
  name: "emberline",
  baseURL: ${JSON.stringify(endpoint.base)},
  apiKey: ${JSON.stringify(key)}${withHeaders("headers")},
});
const { text } = await generateText({
  model: emberline(${JSON.stringify(model)}),
  prompt: "Name the capital of France.",
});
console.log(text);`,
    },
    {
      id: "ollama",
      title: "Ollama clients",
      language: "sh",
      note: "Ollama's API is served by the engine itself, with an API key of the engine if it requires one",
      code: `export OLLAMA_HOST=${shell(endpoint.engine)}\n\ncurl ${shell(`${endpoint.engine}/api/chat`)} \\\n  -d ${shell(JSON.stringify({ model: model.replace(/^emberline\//, ""), messages: body.messages, stream: false }, null, 2))}`,
    },
  ];
}
