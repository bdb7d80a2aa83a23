/** Example tools, which run in this browser: in a worker that has no access to the page and evaluates no program text, with a
    deadline. A call to any other tool waits for a result that the user enters. */

const DEADLINE_MS = 1000;

export const EXAMPLE_TOOLS = [
  tool("calculate", "Compute an arithmetic expression with + - * / % ^, parentheses, sqrt, sin, cos, log, exp, pi.", {
    expression: { type: "string", description: "such as 3 * (4 + 5)" },
  }),
  tool(
    "current_time",
    "Return the current date and time.",
    { timezone: { type: "string", description: "such as Europe/Paris; UTC if left out" } },
    [],
  ),
];

function tool(name, description, properties, required = Object.keys(properties)) {
  return {
    type: "function",
    function: { name, description, parameters: { type: "object", properties, required, additionalProperties: false } },
  };
}

export const isExampleTool = (name) => EXAMPLE_TOOLS.some((each) => each.function.name === name);

/** Return the result of a call to an example tool, as text. An error is a result too, so that the model can react to it. */
export function runExampleTool(name, argumentsText) {
  return new Promise((resolve) => {
    const worker = new Worker(workerURL());
    const finish = (result) => {
      clearTimeout(timer);
      worker.terminate();
      resolve(result);
    };
    const timer = setTimeout(() => finish(`error: ${name} took longer than ${DEADLINE_MS} ms`), DEADLINE_MS);
    worker.onmessage = ({ data }) => finish(String(data));
    worker.onerror = (event) => finish(`error: ${event.message ?? "the tool could not run"}`);
    worker.postMessage({ name, argumentsText });
  });
}

/** The pages' policy requires a checked type for the address of a worker. */
function workerURL() {
  const address = new URL("./tool-worker.js", import.meta.url).href;
  const policy = (workerURL.policy ??= globalThis.trustedTypes?.createPolicy("emberline-tool-worker", {
    createScriptURL: (url) => url,
  }));
  return policy ? policy.createScriptURL(address) : address;
}
