/** Session: the signed-in account and the selected gateway. The key is in sessionStorage: only until the tab is closed. */

import { Api } from "./api.js";

const STORAGE_KEY = "emberline.gateway";

export class Session {
  constructor(token, account, gateway = "") {
    Object.assign(this, { account, gateway });
    this.api = new Api(token, account);
  }

  static load() {
    try {
      const { token, account, gateway } = JSON.parse(sessionStorage.getItem(STORAGE_KEY));
      return new Session(token, account, gateway);
    } catch {
      return null;
    }
  }

  store() {
    sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ token: this.api.token, account: this.account, gateway: this.gateway }));
  }

  static clear() {
    sessionStorage.removeItem(STORAGE_KEY);
  }
}
