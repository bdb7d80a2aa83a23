/** The API reference: the endpoints of this server's OpenAPI documents, and the parameters and fields of each. */

import { element } from "./dom.js";
import { wireTheme } from "./theme.js";

/** [path of the document, title]; a server has one of them or more. */
const DOCUMENTS = [
  ["../openapi.json", "Models"],
  ["../admin/openapi.json", "Management"],
];
/** The paths with which a gateway serves models; they are those of the providers' APIs and in no OpenAPI document. */
const GATEWAY_PATHS = [
  ["POST", "/v1/chat/completions", "Chat completions (OpenAI)"],
  ["POST", "/v1/responses", "Responses (OpenAI)"],
  ["POST", "/v1/messages", "Messages (Anthropic)"],
  ["POST", "/v1/embeddings", "Embeddings (OpenAI)"],
  ["POST", "/v1beta/models/{model}:generateContent", "Generate content (Gemini)"],
  ["GET", "/v1/models", "List the models that the key may use"],
  ["POST", "/v1/{account}/{gateway}/{provider}/…", "A provider's own path"],
  [
    "POST",
    "/v1/{account}/{gateway}/compat/chat/completions",
    "Every provider in OpenAI's format, with model: PROVIDER/MODEL",
  ],
];
const METHODS = ["get", "post", "put", "patch", "delete"];

async function load(path) {
  const reply = await fetch(path, { signal: AbortSignal.timeout(10_000) }).catch(() => null);
  return reply?.ok ? reply.json() : null;
}

function section(title, document) {
  const operations = Object.entries(document.paths).flatMap(([path, methods]) =>
    METHODS.filter((method) => methods[method]).map((method) => endpoint(method, path, methods[method], document)),
  );
  return [element("h2", {}, title), ...operations];
}

function endpoint(method, path, operation, document) {
  const summary = element(
    "summary",
    {},
    element("b", { className: "method" }, method.toUpperCase()),
    element("code", {}, path),
    element("span", {}, operation.summary ?? ""),
  );
  const schema = resolve(Object.values(operation.requestBody?.content ?? {})[0]?.schema, document);
  const parameters = (operation.parameters ?? []).map(({ name, in: place, schema: type }) => [
    name,
    `${place} parameter${describe(type, document)}`,
  ]);
  const fields = Object.entries(schema?.properties ?? {}).map(([name, type]) => [
    name,
    `field of the body${schema.required?.includes(name) ? ", required" : ""}${describe(type, document)}`,
  ]);
  const rows = [...parameters, ...fields].flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]);
  return element(
    "details",
    {},
    summary,
    element("dl", {}, ...(rows.length ? rows : [element("dt", {}, "no parameters"), element("dd", {})])),
  );
}

const resolve = (schema, document) =>
  schema?.$ref ? document.components?.schemas?.[schema.$ref.split("/").at(-1)] : schema;

function describe(schema, document) {
  const found = resolve(schema, document);
  if (!found) return "";
  const kind = found.enum
    ? found.enum.map((value) => JSON.stringify(value)).join(" | ")
    : [found.type].flat().filter(Boolean).join(" or ");
  return [kind && `: ${kind}`, found.description && `. ${found.description}`].filter(Boolean).join("");
}

const root = document.getElementById("reference");
const documents = await Promise.all(DOCUMENTS.map(([path]) => load(path)));
const isGateway = documents[1] !== null;
const plain =
  isGateway && documents[0] === null
    ? [
        element("h2", {}, "Models"),
        ...GATEWAY_PATHS.map(([method, path, summary]) => endpoint(method.toLowerCase(), path, { summary }, {})),
      ]
    : [];
const sections = documents.flatMap((found, i) => (found ? section(DOCUMENTS[i][1], found) : []));
const about = element(
  "p",
  {},
  isGateway
    ? "Send a gateway key as Authorization: Bearer KEY. Management needs an admin key."
    : "Send an API key as Authorization: Bearer KEY if the server requires one.",
);
root.replaceChildren(
  about,
  ...plain,
  ...(sections.length ? sections : [element("p", { role: "alert" }, "The server does not respond.")]),
);
wireTheme(document.getElementById("theme"));
