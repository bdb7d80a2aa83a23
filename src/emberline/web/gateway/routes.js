/** Routes: graphs that select the model. They are edited as JSON, drawn beside it, validated by the gateway, and versioned. */

import { element } from "../dom.js";
import { segment } from "./api.js";
import { formatDateTime } from "./format.js";
import { drawGraph } from "./graph.js";
import { withErrorToast, openDialog, button, openConfirmDialog, field, form, head, link, pill, showToast, table } from "./components.js";

/** The example that a new route starts with: one model, and another as its fallback. */
const EXAMPLE = [
  { type: "start", id: "start", outputs: { next: { elementId: "first" } } },
  { type: "model", id: "first", properties: { provider: "openai", model: "gpt-5-mini", retries: 1 }, outputs: { success: { elementId: "end" }, fallback: { elementId: "second" } } },
  { type: "model", id: "second", properties: { provider: "emberline", model: "smollm2" }, outputs: { success: { elementId: "end" } } },
  { type: "end", id: "end" },
];

export async function routes(session, context) {
  return context.rest[0] ? new Editor(session.api, context, context.rest[0]).open() : listPage(session.api, context);
}

async function listPage(api, context) {
  const items = await api.all("routes", context.signal);
  const name = field({ name: "name", label: "Name", required: true, maxLength: 64, pattern: "[A-Za-z0-9_.\\-]+", wide: true });
  const openCreateDialog = () => {
    const dialogForm = form([name], "Create", ({ name: chosen }) => {
      document.getElementById("dialog").close();
      location.hash = `#/routes/${segment(chosen)}`;
    });
    dialogForm.id = "route-form";
    openDialog("New route", dialogForm);
  };
  const make = button("New route", openCreateDialog, "primary");
  make.id = "new-route";
  const columns = [
    ["Name", (r) => link(`#/routes/${segment(r.name)}`, r.name), "wide"],
    ["Deployed", (r) => (r.deployed === null ? pill("none", "mild") : pill(`version ${r.deployed}`, "good"))],
    ["Latest", (r) => `version ${r.latest}`],
    ["Model name", (r) => element("code", {}, `dynamic/${r.name}`)],
  ];
  const routeTable = table("Routes", columns, items, { none: "No routes yet.", open: (r) => (location.hash = `#/routes/${segment(r.name)}`) });
  return element("div", {}, head("Routes", "Graphs that select the model for a request by conditions, percentages, quotas and fallbacks.", make), element("section", { className: "card", id: "routes-found" }, routeTable));
}

class Editor {
  constructor(api, context, name) {
    Object.assign(this, { api, context, name, path: `routes/${segment(name)}` });
    this.text = element("textarea", { id: "elements", spellcheck: false, ariaLabel: "Elements of the route, as JSON", rows: 26 });
    this.picture = element("div", { className: "picture", id: "graph", tabIndex: 0, role: "region", ariaLabel: "Graph of the route" });
    this.result = element("p", { className: "form-error", id: "result", role: "status", hidden: true });
    this.versions = element("section", { className: "card", id: "versions" });
    this.title = element("span", { className: "entry" });
    this.description = field({ name: "description", label: "Description of this version", maxLength: 2048 });
    this.gateways = field({ name: "gateways", label: "Gateways", value: "*" });
    this.text.addEventListener("input", () => this.draw());
  }

  async open() {
    await this.show();
    const action = (text, id, work, className = "") => {
      const node = button(text, withErrorToast(work), className);
      node.id = id;
      return node;
    };
    const actions = [
      action("Check", "check", () => this.check()),
      action("Save a version", "save", () => this.save()),
      action("Save and deploy", "deploy", async () => (await this.save()) && (await this.deploy(this.route.latest)), "primary"),
    ];
    const options = element("div", { className: "fields" }, this.gateways, this.description);
    const left = element("section", { className: "card source" }, options, this.text, this.result, element("div", { className: "buttons" }, ...actions));
    const back = action("Roll back", "rollback", () => this.rollback());
    const remove = button("Delete", () => this.remove(), "danger");
    return element("div", {}, head(this.title, "", link("#/routes", "All routes"), back, remove), element("div", { className: "editor" }, left, element("section", { className: "card" }, this.picture)), this.versions);
  }

  /** Load the stored versions. A new route starts with an example. */
  async show() {
    const signal = this.context.signal;
    this.route = await this.api.get(this.path, {}, signal).catch((error) => (error.status === 404 ? { latest: 0, deployed: null } : Promise.reject(error)));
    const items = this.route.latest ? (await this.api.all(`${this.path}/versions`, signal)).reverse() : [];
    if (!this.text.value) this.edit(items.find(({ number }) => number === this.route.deployed) ?? items[0] ?? { elements: EXAMPLE, gateways: ["*"] });
    const state = this.route.deployed === null ? pill("not deployed", "mild") : pill(`version ${this.route.deployed} deployed`, "good");
    this.title.replaceChildren(this.name, " ", state);
    const columns = [
      ["Version", ({ number }) => element("b", {}, String(number)), "number"],
      ["Description", ({ description }) => description || "–", "wide"],
      ["Created", ({ created }) => formatDateTime(created)],
      ["By", ({ by }) => by],
      ["", ({ number }) => (number === this.route.deployed ? pill("deployed", "good") : "")],
      ["", (version) => element("span", { className: "actions" }, button("Edit", () => this.edit(version)), button("Deploy", withErrorToast(() => this.deploy(version.number))))],
    ];
    this.versions.replaceChildren(element("h3", {}, "Versions"), table("Versions", columns, items, { none: "No version is saved yet." }));
  }

  edit(version) {
    this.text.value = JSON.stringify(version.elements, null, 2);
    this.gateways.control.value = version.gateways.join(", ");
    this.draw();
  }

  /** Return the elements in the editor; null, with an error shown, if they are not a list of objects. */
  read() {
    try {
      const elements = JSON.parse(this.text.value);
      if (!Array.isArray(elements) || !elements.every((each) => each && typeof each === "object")) throw new Error("The JSON must be a list of elements.");
      this.showResult("", true);
      return elements;
    } catch (error) {
      this.showResult(error.message, false);
      return null;
    }
  }

  draw() {
    const elements = this.read();
    if (elements) this.picture.replaceChildren(drawGraph(elements));
  }

  showResult(text, good) {
    this.result.textContent = text;
    this.result.hidden = !text;
    this.result.dataset.good = String(good);
  }

  requestBody(elements) {
    return { elements, gateways: this.gateways.control.value.split(",").map((each) => each.trim()).filter(Boolean), description: this.description.control.value };
  }

  /** Send the elements and return whether that succeeded; an error is shown below the editor. */
  async post(verb, then) {
    const elements = this.read();
    if (!elements) return false;
    try {
      then(await this.api.send("POST", `${this.path}/${verb}`, this.requestBody(elements)));
      return true;
    } catch (error) {
      this.showResult(error.message, false);
      return false;
    }
  }

  check() {
    return this.post("check", () => this.showResult("The route is valid and can be deployed.", true));
  }

  async save() {
    const saved = await this.post("versions", ({ number }) => showToast(`Version ${number} is saved.`));
    if (saved) await this.show();
    return saved;
  }

  async deploy(version) {
    await this.api.send("POST", `${this.path}/deploy`, { version });
    await this.show();
    showToast(`Version ${version} is deployed.`);
  }

  async rollback() {
    const { deployed } = await this.api.send("POST", `${this.path}/rollback`);
    await this.show();
    showToast(`Version ${deployed} is deployed again.`);
  }

  remove() {
    openConfirmDialog(`Delete ${this.name}?`, "The route and all its versions will be deleted. This cannot be undone.", "Delete", async () => {
      await this.api.send("DELETE", this.path);
      location.hash = "#/routes";
    });
  }
}
