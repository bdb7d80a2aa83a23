/** The gateway's dashboard: the sign-in form and the pages behind it. The URL fragment names the page; leaving a page
    aborts its requests. */

import { element } from "../dom.js";
import { wireTheme } from "../theme.js";
import { Session } from "./session.js";
import { showToast, withIcon } from "./components.js";
import { fetchOk } from "./api.js";
import { audit } from "./audit.js";
import { budgets } from "./budgets.js";
import { connect } from "./connect.js";
import { gateways } from "./gateways.js";
import { keys } from "./keys.js";
import { logs } from "./logs.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { prices } from "./prices.js";
import { providers } from "./providers.js";
import { routes } from "./routes.js";

const $ = (id) => document.getElementById(id);

/** name -> [title, page(session, context) -> node]. The context has the rest of the URL, a signal that is aborted when the
    page is left, and callbacks to report that the gateway responds or that the key is no longer valid. */
const PAGES = {
  overview: ["Overview", overview],
  connect: ["Connect", connect],
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

const WRONG_KEY = "Wrong admin key: this gateway does not know it, or it is expired or revoked.";

class App {
  constructor() {
    this.session = null;
    this.pageAbort = new AbortController();
    const links = Object.entries(PAGES).map(([name, [title]]) => element("a", { href: `#/${name}`, data: { page: name } }, ...withIcon(name, title)));
    $("pages").append(...links);
    window.addEventListener("hashchange", () => this.openPage());
    $("sign-in").addEventListener("submit", (event) => this.signIn(event));
    $("sign-out").addEventListener("click", async () => {
      await this.session?.revoke();
      this.signOut();
    });
    $("skip").addEventListener("click", (event) => {
      event.preventDefault(); // the URL fragment names the page
      $("main").focus();
    });
    // Its content may contain a secret. The event comes late: another dialog may be open already.
    $("dialog").addEventListener("close", () => $("dialog").open || $("dialog").replaceChildren());
    $("gateway").addEventListener("change", () => {
      this.session.gateway = $("gateway").value;
      this.session.store();
      this.openPage();
    });
  }

  async start() {
    const token = location.hash.match(/^#\/sign-in\?token=([\w-]+)$/)?.[1];
    if (token) return this.signInByLink(token);
    const stored = Session.load();
    if (stored) await this.enter(stored);
  }

  /** Exchange the one-time token of a sign-in link for a key. The token is first removed from the address and history. */
  async signInByLink(token) {
    history.replaceState(null, "", "#/overview");
    try {
      const request = { method: "POST", body: JSON.stringify({ token }), headers: { "content-type": "application/json" }, cache: "no-store" };
      const { key, account, id } = await (await fetchOk("sign-in", request)).json();
      await this.enter(new Session(key, account, "", id));
    } catch (error) {
      const stored = Session.load(); // a link that does not work must not end the session that this tab has
      if (stored) showToast(error.message);
      await (stored ? this.enter(stored) : this.signOut(error.message));
    }
  }

  async signIn(event) {
    event.preventDefault();
    const { token, account } = $("sign-in").elements;
    if (!/^[!-~]+$/.test(token.value.trim())) return this.signOut(WRONG_KEY); // such a text cannot be sent as a key
    await this.enter(new Session(token.value.trim(), account.value.trim()));
    if (this.session) token.value = "";
  }

  /** Start a session. A key that may list the gateways is an admin key of the account. */
  async enter(session) {
    $("sign-in-error").hidden = true;
    try {
      await this.loadGateways(session);
    } catch (error) {
      return this.signOut(error.status === 401 ? WRONG_KEY : error.message);
    }
    this.session = session;
    document.body.dataset.signed = "in";
    this.openPage();
  }

  /** Load the gateways that can be selected. */
  async loadGateways(session) {
    this.gateways = (await session.api.all("gateways")).map(({ id }) => id);
    if (!this.gateways.includes(session.gateway)) session.gateway = "";
    const choices = this.gateways.map((name) => element("option", { value: name }, name));
    $("gateway").replaceChildren(element("option", { value: "" }, "all gateways"), ...choices);
    $("gateway").value = session.gateway;
    session.store();
  }

  signOut(reason = "") {
    this.pageAbort.abort();
    $("dialog").close();
    this.session = null;
    Session.clear();
    document.body.dataset.signed = "out";
    $("main").replaceChildren();
    this.showState("unknown", "");
    $("sign-in-error").textContent = reason;
    $("sign-in-error").hidden = !reason;
    $("sign-in").elements.token.focus();
  }

  async openPage() {
    if (location.hash.startsWith("#/sign-in?")) return this.start(); // a sign-in link was opened in a tab of the dashboard
    if (!this.session) return;
    this.pageAbort.abort();
    $("dialog").close();
    const abort = (this.pageAbort = new AbortController());
    const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const [name, ...rest] = path.split("/").map(decodeURIComponent);
    const [title, page] = PAGES[name] ?? PAGES.overview;
    document.title = `${title} · Emberline gateway`;
    for (const each of $("pages").children) {
      const isCurrent = each.dataset.page === (PAGES[name] ? name : "overview");
      each.ariaCurrent = isCurrent ? "page" : null;
      if (isCurrent) each.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    this.showState("unknown", "");
    const context = {
      rest,
      query: new URLSearchParams(query),
      signal: abort.signal,
      gateways: this.gateways,
      showState: (...state) => this.showState(...state),
      changed: () => this.loadGateways(this.session), // a gateway was added or deleted
      signedOut: (error) => this.signOut(error.message),
    };
    await this.runGuarded(abort, async () => {
      const node = await page(this.session, context);
      if (!abort.signal.aborted) $("main").replaceChildren(node);
    });
  }

  /** Run `work`. An invalid key leads back to the sign-in form; other errors are shown in place of the page. */
  async runGuarded(abort, work) {
    try {
      await work();
    } catch (error) {
      if (abort.signal.aborted) return;
      if (error.status === 401) return this.signOut(error.message);
      $("main").replaceChildren(element("p", { className: "notice", role: "alert" }, error.message));
      if (!error.status) console.warn(error);
    }
  }

  showState(state, text, busy = false) {
    $("state").dataset.state = state;
    $("state").textContent = text;
    $("state").hidden = !text;
    document.documentElement.dataset.busy = String(busy);
    document.documentElement.style.setProperty("--heat", busy ? 1 : 0);
  }
}

window.addEventListener("unhandledrejection", (event) => showToast(String(event.reason?.message ?? event.reason)));
wireTheme($("theme"));
new App().start();
