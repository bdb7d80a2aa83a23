/** Session: who is signed in, and which gateway is looked at. The token lives in sessionStorage: in this tab, and no longer. */

import { Api } from "./api.js";

const PLACE = "emberline.gateway";

export class Session {
  constructor(token, account, gateway = "") {
    Object.assign(this, { account, gateway });
    this.api = new Api(token, account);
  }

  static stored() {
    try {
      const { token, account, gateway } = JSON.parse(sessionStorage.getItem(PLACE));
      return new Session(token, account, gateway);
    } catch {
      return null;
    }
  }

  keep() {
    sessionStorage.setItem(PLACE, JSON.stringify({ token: this.api.token, account: this.account, gateway: this.gateway }));
  }

  static forget() {
    sessionStorage.removeItem(PLACE);
  }
}
