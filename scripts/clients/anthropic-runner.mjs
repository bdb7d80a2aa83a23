// A conversation of Anthropic's tool runner for JavaScript. Arguments: URL, MODEL.
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { z } from 'zod';

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: process.env.EMBERLINE_API_KEY });
const bash = betaZodTool({
  name: 'bash',
  description: 'Runs a command',
  inputSchema: z.object({ command: z.string() }),
  run: async ({ command }) => command.replace('echo ', ''),
});
const messages = [{ role: 'user', content: 'Run echo please' }];
for (const stream of [false, true]) {
  const reply = await client.beta.messages.toolRunner({ model, max_tokens: 1000, messages, tools: [bash], stream }).runUntilDone();
  console.log(reply.content.map((block) => block.text ?? '').join(''));
  messages.push({ role: 'assistant', content: reply.content }, { role: 'user', content: 'Run echo again' });
}
