/** Builds DOM nodes from data. Strings only become text nodes, never markup. */

export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(node.dataset, value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

export function iconButton(name, label, onclick) {
  return element("button", { type: "button", className: "icon", title: label, ariaLabel: label, onclick }, icon(name));
}

export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const copied = await copy(text());
    button.replaceChildren(icon(copied ? "done" : "copy"));
    button.title = copied ? "Copied" : "The browser did not allow copying";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = label;
    }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Plain http from another host is not a secure context, where the clipboard API does not exist.
    const area = element("textarea", { className: "sr", value: text });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}
