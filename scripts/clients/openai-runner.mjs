// A conversation of OpenAI's tool runner for JavaScript. Arguments: URL, MODEL.
import OpenAI from 'openai';

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.EMBERLINE_API_KEY });
const bash = {
  name: 'bash',
  parse: JSON.parse,
  function: ({ command }) => command.replace('echo ', ''),
  parameters: { type: 'object', properties: { command: { type: 'string' } }, required: ['command'] },
};
const messages = [{ role: 'user', content: 'Run echo please' }];
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model, messages, stream, tools: [{ type: 'function', function: bash }] });
  const text = await runner.finalContent();
  console.log(text);
  messages.push({ role: 'assistant', content: text }, { role: 'user', content: 'Run echo again' });
}
