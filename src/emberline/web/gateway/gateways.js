/** Gateways and their settings, as forms. Gateways of the configuration file are shown, but cannot be changed here. */

import { element } from "../dom.js";
import { segment } from "./api.js";
import {
  button,
  closeDialog,
  field,
  form,
  head,
  link,
  openConfirmDialog,
  openDialog,
  pill,
  showToast,
  table,
} from "./components.js";
import { SettingsForm } from "./settings-form.js";

const DEFAULT = "default";
const NAME_PATTERN = "[A-Za-z0-9_.\\-]+";
const isConfigured = ({ version }) => version === 0;

export async function gateways(session, context) {
  return context.rest[0] ? new GatewayPage(session, context, context.rest[0]).open() : listPage(session, context);
}

async function listPage(session, context) {
  const items = await session.api.all("gateways", context.signal);
  const create = button("New gateway", () => openCreateDialog(session, context), "primary");
  create.id = "new-gateway";
  const open = ({ id }) => (location.hash = `#/gateways/${segment(id)}`);
  const columns = [
    ["Name", ({ id }) => link(`#/gateways/${segment(id)}`, id), "wide"],
    ["Key", ({ value }) => (value.authentication ? pill("required", "good") : pill("not required", "mild"))],
    ["Cache", ({ value }) => (value.cache_ttl ? `${value.cache_ttl} s` : "off")],
    ["Retries", ({ value }) => (value.retries.attempts > 1 ? `${value.retries.attempts - 1}` : "off")],
    ["Fallbacks", ({ value }) => (value.fallbacks.length ? String(value.fallbacks.length) : "none")],
    ["Limits", ({ value }) => String(value.limits.length + value.budgets.length || "none")],
    [
      "Logs",
      ({ value }) =>
        value.logs.collect
          ? `${value.logs.days} days${value.zdr || !value.logs.payloads ? ", no payloads" : ""}`
          : "off",
    ],
    ["Defined in", (item) => (isConfigured(item) ? pill("configuration file", "mild") : "dashboard")],
    [
      "",
      (item) =>
        element(
          "span",
          { className: "actions" },
          button(isConfigured(item) ? "View" : "Change", () => open(item)),
        ),
    ],
  ];
  const list = element(
    "section",
    { className: "card", id: "gateways-found" },
    table("Gateways", columns, items, { open }),
  );
  const about =
    "Each gateway has its own authentication, cache, retries, fallbacks, limits and logs. Requests that name no gateway use default.";
  return element("div", {}, head("Gateways", about, create), list);
}

function openCreateDialog(session, context) {
  const name = field({
    name: "name",
    label: "Name",
    required: true,
    maxLength: 64,
    pattern: NAME_PATTERN,
    wide: true,
    hint: "letters, digits, dots, dashes and underscores",
  });
  const dialogForm = form([name], "Create", async ({ name: chosen }) => {
    await session.api.send("POST", `gateways/${segment(chosen)}`, { authentication: true });
    await context.changed();
    closeDialog();
    location.hash = `#/gateways/${segment(chosen)}`;
  });
  dialogForm.id = "gateway-form";
  openDialog("New gateway", dialogForm);
}

class GatewayPage {
  constructor(session, context, name) {
    Object.assign(this, { session, api: session.api, context, name, path: `gateways/${segment(name)}` });
    this.node = element("div", { id: "gateway-page", data: { id: name } });
  }

  async open() {
    await this.show();
    return this.node;
  }

  async show() {
    const item = await this.api.get(this.path, {}, this.context.signal);
    const settings = new SettingsForm(item.value, {
      isReadOnly: isConfigured(item),
      save: (value) => this.save(item, value),
    });
    const all = link("#/gateways", "All gateways");
    const actions = isConfigured(item) ? [all] : [all, this.resetButton(item), this.deleteButton(item)];
    const about = `Requests use it with the header cf-aig-gateway-id: ${this.name}, or on the paths /v1/${this.session.account}/${this.name}/…`;
    const title = element("span", { className: "entry" }, this.name);
    this.node.replaceChildren(
      head(title, this.name === DEFAULT ? "Requests that name no gateway use this one." : about, ...actions),
      this.notice(item),
      settings.node,
    );
  }

  notice(item) {
    if (!isConfigured(item)) return "";
    const table = element("code", {}, `[gateways.${this.name}]`);
    const text = [
      "This gateway is defined in the configuration file, in the table ",
      table,
      ". The file overrides anything that is set here, so these settings are read-only. Change the file and restart the gateway, or delete the table to set them here.",
    ];
    return element(
      "p",
      { className: "alarm", id: "defined-in-file", role: "status" },
      element("strong", {}, "Read-only. "),
      ...text,
    );
  }

  async save(item, value) {
    await this.api.send("PUT", `${this.path}?version=${item.version}`, value);
    await this.show();
    await this.context.changed();
    showToast(`The settings of ${this.name} are saved. They apply to new requests within a second.`);
  }

  resetButton(item) {
    const reset = () =>
      openConfirmDialog(
        `Restore the default settings of ${this.name}?`,
        "All settings of this gateway are replaced, also authentication, limits and providers.",
        "Restore",
        async () => {
          await this.save(item, {});
          closeDialog();
        },
      );
    return button("Restore defaults", reset);
  }

  deleteButton(item) {
    if (this.name === DEFAULT) return null;
    const remove = () =>
      openConfirmDialog(
        `Delete ${this.name}?`,
        "Requests to it will be rejected. Its logs are kept until they expire.",
        "Delete",
        async () => {
          await this.api.send("DELETE", `${this.path}?version=${item.version}`);
          await this.context.changed();
          location.hash = "#/gateways";
        },
      );
    return button("Delete", remove, "danger");
  }
}
