/** The gateway's dashboard: a door, and rooms behind it. The address after # says which room; what a room has begun ends
    when it is left. */

import { element } from "../dom.js";
import { wireTheme } from "../theme.js";
import { Session } from "./session.js";
import { say, withIcon } from "./parts.js";
import { audit } from "./audit.js";
import { budgets } from "./budgets.js";
import { gateways } from "./gateways.js";
import { keys } from "./keys.js";
import { logs } from "./logs.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { prices } from "./prices.js";
import { providers } from "./providers.js";
import { routes } from "./routes.js";

const $ = (id) => document.getElementById(id);

/** name -> [title, room(session, where) -> node]; where: what follows in the address, the
    signal that it is left, and how to tell the frame that the gateway is alive or knows the key no more. */
const ROOMS = {
  overview: ["Overview", overview],
  logs: ["Logs", logs],
  playground: ["Playground", playground],
  keys: ["Keys", keys],
  budgets: ["Budgets", budgets],
  routes: ["Routes", routes],
  gateways: ["Gateways", gateways],
  providers: ["Providers", providers],
  prices: ["Prices", prices],
  audit: ["Changes", audit],
};

class App {
  constructor() {
    this.session = null;
    this.leaving = new AbortController();
    const links = Object.entries(ROOMS).map(([name, [title]]) => element("a", { href: `#/${name}`, data: { room: name } }, ...withIcon(name, title)));
    $("rooms").append(...links);
    window.addEventListener("hashchange", () => this.go());
    $("sign-in").addEventListener("submit", (event) => this.knock(event));
    $("sign-out").addEventListener("click", () => this.leave());
    $("skip").addEventListener("click", (event) => {
      event.preventDefault(); // what follows # says the room
      $("main").focus();
    });
    $("dialog").addEventListener("close", () => $("dialog").replaceChildren()); // there may be a secret in it
    $("gateway").addEventListener("change", () => {
      this.session.gateway = $("gateway").value;
      this.session.keep();
      this.go();
    });
  }

  async start() {
    const stored = Session.stored();
    if (stored) await this.enter(stored);
  }

  async knock(event) {
    event.preventDefault();
    const { token, account } = $("sign-in").elements;
    await this.enter(new Session(token.value.trim(), account.value.trim()));
    if (this.session) token.value = "";
  }

  /** Whoever may list the gateways is an admin of the account. */
  async enter(session) {
    $("refused").hidden = true;
    try {
      await this.look(session);
    } catch (error) {
      return this.leave(error.message);
    }
    this.session = session;
    document.body.dataset.signed = "in";
    this.go();
  }

  /** Which gateways there are to choose from. */
  async look(session) {
    this.gateways = (await session.api.all("gateways")).map(({ id }) => id);
    if (!this.gateways.includes(session.gateway)) session.gateway = "";
    const choices = this.gateways.map((name) => element("option", { value: name }, name));
    $("gateway").replaceChildren(element("option", { value: "" }, "all gateways"), ...choices);
    $("gateway").value = session.gateway;
    session.keep();
  }

  leave(why = "") {
    this.leaving.abort();
    $("dialog").close();
    this.session = null;
    Session.forget();
    document.body.dataset.signed = "out";
    $("main").replaceChildren();
    this.live("unknown", "");
    $("refused").textContent = why;
    $("refused").hidden = !why;
    $("sign-in").elements.token.focus();
  }

  async go() {
    if (!this.session) return;
    this.leaving.abort();
    $("dialog").close();
    const leaving = (this.leaving = new AbortController());
    const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const [name, ...rest] = path.split("/").map(decodeURIComponent);
    const [title, room] = ROOMS[name] ?? ROOMS.overview;
    document.title = `${title} · Emberline gateway`;
    for (const each of $("rooms").children) {
      const isHere = each.dataset.room === (ROOMS[name] ? name : "overview");
      each.ariaCurrent = isHere ? "page" : null;
      if (isHere) each.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    this.live("unknown", "");
    const where = {
      rest,
      query: new URLSearchParams(query),
      signal: leaving.signal,
      gateways: this.gateways,
      live: (...state) => this.live(...state),
      changed: () => this.look(this.session), // there is a gateway more, or less
      expelled: (error) => this.leave(error.message),
    };
    await this.guarded(leaving, async () => {
      const node = await room(this.session, where);
      if (!leaving.signal.aborted) $("main").replaceChildren(node);
    });
  }

  /** A key that is no longer known leads back to the door; other failures are told in the room's place. */
  async guarded(leaving, work) {
    try {
      await work();
    } catch (error) {
      if (leaving.signal.aborted) return;
      if (error.status === 401) return this.leave(error.message);
      $("main").replaceChildren(element("p", { className: "notice", role: "alert" }, error.message));
      if (!error.status) console.warn(error);
    }
  }

  live(state, text, busy = false) {
    $("state").dataset.state = state;
    $("state").textContent = text;
    $("state").hidden = !text;
    document.documentElement.dataset.busy = String(busy);
    document.documentElement.style.setProperty("--heat", busy ? 1 : 0);
  }
}

window.addEventListener("unhandledrejection", (event) => say(String(event.reason?.message ?? event.reason)));
wireTheme($("theme"));
new App().start();
