/** Runs one call of an example tool. Expressions are parsed here and never evaluated as program text. */

const TOKEN = /\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|[a-z]+|[-+*/%^(),])/iy;
const FUNCTIONS = {
  sqrt: Math.sqrt,
  sin: Math.sin,
  cos: Math.cos,
  tan: Math.tan,
  log: Math.log,
  exp: Math.exp,
  abs: Math.abs,
  round: Math.round,
};
const CONSTANTS = { pi: Math.PI, e: Math.E };
const MAX_CHARS = 1000;

onmessage = ({ data: { name, argumentsText } }) => {
  try {
    if (!Object.hasOwn(TOOLS, name)) throw new Error(`there is no tool ${name}`);
    postMessage(TOOLS[name](JSON.parse(argumentsText || "{}")));
  } catch (error) {
    postMessage(`error: ${error.message}`);
  }
};

const TOOLS = {
  calculate: ({ expression }) => String(calculate(String(expression))),
  current_time: ({ timezone = "UTC" }) =>
    new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long", timeZone: timezone }).format(new Date()),
};

function calculate(text) {
  if (text.length > MAX_CHARS) throw new Error(`the expression is longer than ${MAX_CHARS} characters`);
  const tokens = tokenize(text);
  const value = sum(tokens);
  if (tokens.length) throw new Error(`unexpected ${tokens[0]} in ${text}`);
  return Number(value.toPrecision(15));
}

function tokenize(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  for (let at = 0; text.slice(at).trim(); at = TOKEN.lastIndex) {
    const match = TOKEN.exec(text);
    if (!match) throw new Error(`cannot read ${text.slice(at, at + 20)}`);
    tokens.push(match[1]);
  }
  return tokens;
}

const isOperator = (token, operators) => token !== undefined && operators.includes(token);

function sum(tokens) {
  let value = product(tokens);
  while (isOperator(tokens[0], ["+", "-"]))
    value = tokens.shift() === "+" ? value + product(tokens) : value - product(tokens);
  return value;
}

function product(tokens) {
  let value = unary(tokens);
  while (isOperator(tokens[0], ["*", "/", "%"])) {
    const operator = tokens.shift();
    const right = unary(tokens);
    value = operator === "*" ? value * right : operator === "/" ? value / right : value % right;
  }
  return value;
}

function unary(tokens) {
  if (isOperator(tokens[0], ["+", "-"])) return tokens.shift() === "-" ? -unary(tokens) : unary(tokens);
  return power(tokens);
}

function power(tokens) {
  const base = atom(tokens);
  if (tokens[0] !== "^" && !(tokens[0] === "*" && tokens[1] === "*")) return base;
  tokens.splice(0, tokens[0] === "^" ? 1 : 2);
  return base ** unary(tokens);
}

function atom(tokens) {
  const token = tokens.shift();
  if (token === undefined) throw new Error("the expression is incomplete");
  if (token === "(") return closed(tokens, sum(tokens));
  if (/^[\d.]/.test(token)) return Number(token);
  const name = token.toLowerCase();
  if (Object.hasOwn(CONSTANTS, name)) return CONSTANTS[name];
  if (!Object.hasOwn(FUNCTIONS, name) || tokens.shift() !== "(") throw new Error(`unknown ${token}`);
  return FUNCTIONS[name](closed(tokens, sum(tokens)));
}

function closed(tokens, value) {
  if (tokens.shift() !== ")") throw new Error("a parenthesis is not closed");
  return value;
}
