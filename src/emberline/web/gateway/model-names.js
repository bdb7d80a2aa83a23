/** The models that a gateway offers for chats. */

import { fetchOk } from "./api.js";

/** Return [{ id, max_model_len, kind, ... }]: models of the providers, then deployed routes. An unavailable list is empty. */
export async function loadModels(session, gateway, signal) {
  const headers = { ...session.api.headers, "cf-aig-gateway-id": gateway };
  const listed = fetchOk(
    `accounts/${encodeURIComponent(session.account)}/ai/v1/models`,
    { headers, signal },
    signal,
  ).then((reply) => reply.json());
  const [models, routes] = await Promise.all([
    listed.catch(() => ({ data: [] })),
    session.api.all("routes", signal).catch(() => []),
  ]);
  const chat = models.data.filter(({ kind = "chat" }) => kind === "chat");
  const deployed = routes.filter((route) => route.deployed !== null).map(({ name }) => ({ id: `dynamic/${name}` }));
  return [...chat, ...deployed];
}

export const loadModelNames = async (session, gateway, signal) =>
  (await loadModels(session, gateway, signal)).map(({ id }) => id);
