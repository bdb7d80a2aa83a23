/** Syntax highlighting by one small lexer for all languages: comments, strings, numbers, keywords. */

import { element } from "./dom.js";

const HASH = new Set(["python", "py", "sh", "bash", "shell", "zsh", "ruby", "rb", "yaml", "yml", "toml", "perl", "r", "make", "dockerfile"]);
const DASH = new Set(["sql", "lua", "haskell", "hs"]);
const PLAIN = new Set(["", "text", "txt", "markdown", "md"]);

const STRING = /"""[^]*?(?:"""|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`?/;
const NUMBER = /\b(?:0x[\da-f]+|\d[\d_]*\.?\d*(?:e[+-]?\d+)?)\b/;
const KEYWORD = new RegExp(
  "\\b(?:" +
    "and|as|assert|async|await|begin|bool|break|case|catch|char|class|const|continue|def|default|del|do|done|double|elif|else|end|enum|except|export|extends|" +
    "false|fi|final|finally|float|fn|for|from|func|function|global|if|impl|implements|import|in|insert|int|interface|into|is|join|lambda|let|long|loop|match|mod|mut|namespace|" +
    "new|nil|none|not|null|or|package|pass|private|protected|pub|public|raise|return|select|self|static|str|string|struct|super|switch|then|this|throw|trait|" +
    "true|try|type|typeof|union|unsigned|update|use|var|void|where|while|with|yield" +
    ")\\b",
);

export function highlight(code, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name)) return [code];
  const nodes = [];
  let from = 0;
  for (const match of code.matchAll(lexer(name))) {
    const kind = Object.keys(match.groups).find((group) => match.groups[group] !== undefined);
    nodes.push(code.slice(from, match.index), element("span", { className: `t-${kind}` }, match[0]));
    from = match.index + match[0].length;
  }
  return [...nodes, code.slice(from)];
}

function lexer(name) {
  const comment = HASH.has(name) ? "#.*" : DASH.has(name) ? "--.*" : "//.*|/\\*[^]*?(?:\\*/|$)|<!--[^]*?(?:-->|$)";
  return new RegExp(`(?<comment>${comment})|(?<string>${STRING.source})|(?<number>${NUMBER.source})|(?<keyword>${KEYWORD.source})`, "gi");
}
