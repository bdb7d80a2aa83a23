/** Routes: graphs that decide who answers. Written as JSON, drawn beside it, checked by the gateway, kept as versions. */

import { element } from "../dom.js";
import { part } from "./api.js";
import { exactly } from "./figures.js";
import { drawn } from "./graph.js";
import { acting, ask, button, confirmed, field, form, head, link, pill, say, table } from "./parts.js";

/** Where a new route begins: one model, and another when it cannot answer. */
const FIRST = [
  { type: "start", id: "start", outputs: { next: { elementId: "first" } } },
  { type: "model", id: "first", properties: { provider: "openai", model: "gpt-5-mini", retries: 1 }, outputs: { success: { elementId: "end" }, fallback: { elementId: "second" } } },
  { type: "model", id: "second", properties: { provider: "emberline", model: "smollm2" }, outputs: { success: { elementId: "end" } } },
  { type: "end", id: "end" },
];

export async function routes(session, where) {
  return where.rest[0] ? new Editor(session.api, where, where.rest[0]).open() : listed(session.api, where);
}

async function listed(api, where) {
  const items = await api.all("routes", where.signal);
  const name = field({ name: "name", label: "Name", required: true, maxLength: 64, pattern: "[A-Za-z0-9_.\\-]+", wide: true });
  const begin = () => {
    const wanted = form([name], "Begin", ({ name: chosen }) => {
      document.getElementById("dialog").close();
      location.hash = `#/routes/${part(chosen)}`;
    });
    wanted.id = "route-form";
    ask("New route", wanted);
  };
  const make = button("New route", begin, "primary");
  make.id = "new-route";
  const columns = [
    ["Name", (r) => link(`#/routes/${part(r.name)}`, r.name), "wide"],
    ["Deployed", (r) => (r.deployed === null ? pill("none", "mild") : pill(`version ${r.deployed}`, "good"))],
    ["Newest", (r) => `version ${r.latest}`],
    ["Asked for as", (r) => element("code", {}, `dynamic/${r.name}`)],
  ];
  const found = table("Routes", columns, items, { none: "No routes yet.", open: (r) => (location.hash = `#/routes/${part(r.name)}`) });
  return element("div", {}, head("Routes", "Which model answers: by conditions, shares, quotas, and who can.", make), element("section", { className: "card", id: "routes-found" }, found));
}

class Editor {
  constructor(api, where, name) {
    Object.assign(this, { api, where, name, path: `routes/${part(name)}` });
    this.text = element("textarea", { id: "elements", spellcheck: false, ariaLabel: "Elements of the route, as JSON", rows: 26 });
    this.picture = element("div", { className: "picture", id: "graph", tabIndex: 0, role: "region", ariaLabel: "The graph" });
    this.told = element("p", { className: "complaint", id: "told", role: "status", hidden: true });
    this.versions = element("section", { className: "card", id: "versions" });
    this.title = element("span", { className: "place" });
    this.description = field({ name: "description", label: "What this version is about", maxLength: 2048 });
    this.gateways = field({ name: "gateways", label: "Gateways", value: "*" });
    this.text.addEventListener("input", () => this.draw());
  }

  async open() {
    await this.show();
    const act = (text, id, work, className = "") => {
      const made = button(text, acting(work), className);
      made.id = id;
      return made;
    };
    const actions = [
      act("Check", "check", () => this.check()),
      act("Save a version", "save", () => this.save()),
      act("Save and deploy", "deploy", async () => (await this.save()) && (await this.deploy(this.route.latest)), "primary"),
    ];
    const wishes = element("div", { className: "fields" }, this.gateways, this.description);
    const left = element("section", { className: "card written" }, wishes, this.text, this.told, element("div", { className: "buttons" }, ...actions));
    const back = act("Roll back", "rollback", () => this.rollback());
    const gone = button("Delete", () => this.remove(), "danger");
    return element("div", {}, head(this.title, "", link("#/routes", "All routes"), back, gone), element("div", { className: "editor" }, left, element("section", { className: "card" }, this.picture)), this.versions);
  }

  /** What is stored. A route that is not there yet begins with an example. */
  async show() {
    const signal = this.where.signal;
    this.route = await this.api.get(this.path, {}, signal).catch((error) => (error.status === 404 ? { latest: 0, deployed: null } : Promise.reject(error)));
    const items = this.route.latest ? (await this.api.all(`${this.path}/versions`, signal)).reverse() : [];
    if (!this.text.value) this.put(items.find(({ number }) => number === this.route.deployed) ?? items[0] ?? { elements: FIRST, gateways: ["*"] });
    const state = this.route.deployed === null ? pill("not deployed", "mild") : pill(`version ${this.route.deployed} deployed`, "good");
    this.title.replaceChildren(this.name, " ", state);
    const columns = [
      ["Version", ({ number }) => element("b", {}, String(number)), "number"],
      ["About", ({ description }) => description || "–", "wide"],
      ["Made", ({ created }) => exactly(created)],
      ["By", ({ by }) => by],
      ["", ({ number }) => (number === this.route.deployed ? pill("deployed", "good") : "")],
      ["", (version) => element("span", { className: "actions" }, button("Edit", () => this.put(version)), button("Deploy", acting(() => this.deploy(version.number))))],
    ];
    this.versions.replaceChildren(element("h3", {}, "Versions"), table("Versions", columns, items, { none: "None is saved yet." }));
  }

  put(version) {
    this.text.value = JSON.stringify(version.elements, null, 2);
    this.gateways.control.value = version.gateways.join(", ");
    this.draw();
  }

  /** The elements as they are written; null, and said so, where they are no list of objects. */
  read() {
    try {
      const found = JSON.parse(this.text.value);
      if (!Array.isArray(found) || !found.every((each) => each && typeof each === "object")) throw new Error("It must be a list of elements.");
      this.tell("", true);
      return found;
    } catch (error) {
      this.tell(error.message, false);
      return null;
    }
  }

  draw() {
    const found = this.read();
    if (found) this.picture.replaceChildren(drawn(found));
  }

  tell(text, good) {
    this.told.textContent = text;
    this.told.hidden = !text;
    this.told.dataset.good = String(good);
  }

  wish(elements) {
    return { elements, gateways: this.gateways.control.value.split(",").map((each) => each.trim()).filter(Boolean), description: this.description.control.value };
  }

  /** True: done. What the gateway finds wrong is told beside the text. */
  async tried(verb, then) {
    const elements = this.read();
    if (!elements) return false;
    try {
      then(await this.api.send("POST", `${this.path}/${verb}`, this.wish(elements)));
      return true;
    } catch (error) {
      this.tell(error.message, false);
      return false;
    }
  }

  check() {
    return this.tried("check", () => this.tell("It can be deployed.", true));
  }

  async save() {
    const saved = await this.tried("versions", ({ number }) => say(`Version ${number} is saved.`));
    if (saved) await this.show();
    return saved;
  }

  async deploy(version) {
    await this.api.send("POST", `${this.path}/deploy`, { version });
    await this.show();
    say(`Version ${version} is deployed.`);
  }

  async rollback() {
    const { deployed } = await this.api.send("POST", `${this.path}/rollback`);
    await this.show();
    say(`Version ${deployed} is deployed again.`);
  }

  remove() {
    confirmed(`Delete ${this.name}?`, "The route and all its versions go for good.", "Delete", async () => {
      await this.api.send("DELETE", this.path);
      location.hash = "#/routes";
    });
  }
}
