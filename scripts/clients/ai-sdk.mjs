// Conversations of the AI SDK's providers with a tool. Arguments: URL, MODEL, and the provider's name.
import * as ai from 'ai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';

const [url, name, provider] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: process.env.EMBERLINE_API_KEY };
const models = {
  'openai responses': () => createOpenAI(options).responses(name),
  'openai chat': () => createOpenAI(options).chat(name),
  'anthropic': () => createAnthropic(options)(name),
  'openai-compatible': () => createOpenAICompatible({ name: 'emberline', ...options })(name),
};
const bash = ai.tool({
  description: 'Runs a command',
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => command.replace('echo ', ''),
});
// Behind a gateway that translates, no server stores items that the Responses API could refer to.
const providerOptions = { openai: { store: process.env.STORE !== 'false' } };
const ask = { model: models[provider](), tools: { bash }, providerOptions, stopWhen: (ai.isStepCount ?? ai.stepCountIs)(5) };
const messages = [];
for (const stream of [false, true]) {
  messages.push({ role: 'user', content: 'Run echo please' });
  const result = stream ? ai.streamText({ ...ask, messages }) : await ai.generateText({ ...ask, messages });
  console.log(await result.text);
  messages.push(...((await result.responseMessages) ?? (await result.response).messages));
}
