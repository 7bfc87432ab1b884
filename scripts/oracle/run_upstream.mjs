// Runs a GGUF in upstream's llama.cpp as compiled to WebAssembly, and prints log-probabilities as one JSON line.
//
//   WLLAMA=.../package/esm node run_upstream.mjs MODEL.gguf PROMPT.txt COUNT '{"n_ubatch": 64}'
//
// WLLAMA is the esm folder of the npm package @wllama/wllama 3.13.0 (llama.cpp b12211), which needs a browser:
// Chromium at $CHROMIUM (/usr/bin/chromium by default), driven by puppeteer-core from the folder $PUPPETEER.
// The first of COUNT rows is the distribution after the prompt; each further one is after the likeliest token.

import fs from 'node:fs';
import http from 'node:http';
import { createRequire } from 'node:module';
import path from 'node:path';

const [, , model, promptFile, count = '1', options = '{}'] = process.argv;
const root = process.env.WLLAMA;
const puppeteer = createRequire(path.join(process.env.PUPPETEER ?? process.cwd(), 'x.js'))('puppeteer-core');
const LIMIT_MS = 300000;
const TYPES = { '.js': 'text/javascript', '.wasm': 'application/wasm' };

async function inPage({ prompt, count, options }) {
  const { Wllama } = await import('/index.js');
  const quiet = { debug() {}, log() {}, warn() {}, error: (...words) => console.log('wllama:', ...words) };
  const engine = new Wllama({ default: '/wasm/wllama.wasm' }, { logger: quiet, suppressNativeLog: false });
  const blob = await (await fetch('/model.gguf')).blob();
  await engine.loadModel([blob], {
    n_ctx: 1024, n_batch: 512, n_ubatch: 512, n_threads: 1, n_gpu_layers: 0, n_parallel: 1, warmup: false,
    flash_attn: false, cache_type_k: 'f32', cache_type_v: 'f32', ...options,
  });
  return await engine.createCompletion({
    prompt, max_tokens: count, temperature: 0, logprobs: 64, n_probs: 64, cache_prompt: false,
  });
}

const server = http.createServer((request, response) => {
  // Threads in WebAssembly need shared memory, which needs these two.
  response.setHeader('Cross-Origin-Opener-Policy', 'same-origin');
  response.setHeader('Cross-Origin-Embedder-Policy', 'require-corp');
  const name = request.url.split('?')[0];
  if (name === '/') return response.setHeader('Content-Type', 'text/html').end('<!doctype html>');
  const file = name === '/model.gguf' ? model : path.join(root, path.normalize(name));
  if (!fs.existsSync(file)) return response.writeHead(404).end();
  response.setHeader('Content-Type', TYPES[path.extname(file)] ?? 'application/octet-stream');
  fs.createReadStream(file).pipe(response);
});

server.listen(0, '127.0.0.1', async () => {
  const browser = await puppeteer.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, protocolTimeout: LIMIT_MS,
    args: ['--no-sandbox', '--disable-gpu', '--js-flags=--experimental-wasm-memory64',
      '--enable-features=WebAssemblyJavaScriptPromiseIntegration'],
  });
  let status = 0;
  try {
    const page = await browser.newPage();
    page.on('console', (message) => console.error(message.text()));
    await page.goto(`http://127.0.0.1:${server.address().port}/`);
    const prompt = fs.readFileSync(promptFile, 'utf8');
    const result = await page.evaluate(inPage, { prompt, count: Number(count), options: JSON.parse(options) });
    console.log(JSON.stringify(result));
  } catch (error) {
    console.error(String(error));
    status = 1;
  }
  await browser.close();
  server.close();
  process.exit(status);
});
