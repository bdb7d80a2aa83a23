/** Session: the signed-in account and the selected gateway. The key is in sessionStorage: only until the tab is closed. */

import { Api } from "./api.js";

const STORAGE_KEY = "emberline.gateway";

export class Session {
  /** `keyId`: the id of a key that was made for this session only, by a sign-in link. */
  constructor(token, account, gateway = "", keyId = "") {
    Object.assign(this, { account, gateway, keyId });
    this.api = new Api(token, account);
  }

  static load() {
    try {
      const { token, account, gateway, keyId } = JSON.parse(sessionStorage.getItem(STORAGE_KEY));
      return new Session(token, account, gateway, keyId);
    } catch {
      return null;
    }
  }

  store() {
    sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ token: this.api.token, account: this.account, gateway: this.gateway, keyId: this.keyId }));
  }

  /** Revoke the key if it was made for this session. It expires by itself if this fails. */
  async revoke() {
    if (this.keyId) await this.api.send("DELETE", `keys/${this.keyId}`).catch(() => {});
  }

  static clear() {
    sessionStorage.removeItem(STORAGE_KEY);
  }
}
