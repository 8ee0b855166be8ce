// Looks at a dashboard in Debian's Chromium, as a person would. Prints one JSON object.
//
//   node look.mjs PLAYWRIGHT_CORE URL FOLDER LOOKS
//
// LOOKS is a JSON list of {name, width, height, scheme, workers, token?, press?}. What each look saw is in the answer,
// and FOLDER/NAME.png shows it. Waits are for conditions, each with a deadline.
import { createRequire } from "node:module";
import { join } from "node:path";

const [library, url, folder, looks] = process.argv.slice(2);
const { chromium } = createRequire(import.meta.url)(library);
const DEADLINE = 60000;

async function look(browser, { name, width, height, scheme, workers, token, press, full = true }) {
  const phone = width < 600;
  const context = await browser.newContext({
    viewport: { width, height }, colorScheme: scheme, hasTouch: phone, deviceScaleFactor: 1, reducedMotion: "reduce",
  });
  context.setDefaultTimeout(DEADLINE);
  const page = await context.newPage();
  const problems = [], foreign = [];
  page.on("console", message => { if (["error", "warning"].includes(message.type())) problems.push(message.text()); });
  page.on("pageerror", error => problems.push(String(error)));
  page.on("request", request => { if (!request.url().startsWith(url) && !request.url().startsWith("data:")) foreign.push(request.url()); });
  await page.goto(url);
  if (token && !press) await page.evaluate(given => sessionStorage.setItem("ayni-token", given), token);
  await page.waitForFunction(count => Number(document.body.dataset.views) >= 3
    && document.querySelectorAll("#rows tr").length === count && document.querySelectorAll("#loss path").length > 0, workers);
  const answers = press ? await pressed(page, press, token) : {};
  const seen = await page.evaluate(() => ({
    title: document.title,
    names: [...document.querySelectorAll("#rows td.name span")].map(one => one.textContent),
    state: document.querySelector("#state").textContent,
    numbers: document.querySelector("#numbers").innerText,
    events: [...document.querySelectorAll("#events span")].map(one => one.textContent),
    tiers: document.querySelector("#tiers").innerText,
    barWidths: [...document.querySelectorAll("#rows .bar.last i")].map(one => one.getBoundingClientRect().width),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    clipped: document.querySelector("#scroll").scrollWidth - document.querySelector("#scroll").clientWidth,
    markup: document.querySelectorAll("#rows img, #rows script, #rows b, #events img, #banner img, #run img").length,
    hacked: window.hacked === true,
    lossLabel: document.querySelector("#loss").getAttribute("aria-label"),
    unnamed: [...document.querySelectorAll("button, input, select, [role=img], [role=progressbar]")]
      .filter(one => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length)).map(one => one.outerHTML),
    background: getComputedStyle(document.body).backgroundColor,
    contrast: worst(),
  }));
  await page.screenshot({ path: join(folder, `${name}.png`), fullPage: full });
  const keys = await tabbed(page);
  await context.close();
  return { ...seen, ...answers, problems, foreign, keys };
}

// Which controls the tab key reaches, in order.
async function tabbed(page) {
  await page.evaluate(() => { document.activeElement?.blur(); scrollTo(0, 0); });
  const reached = [];
  for (let press = 0; press < 40; press += 1) {
    await page.keyboard.press("Tab");
    const name = await page.evaluate(() => {
      const one = document.activeElement;
      if (!one || one === document.body) return "";
      const outline = getComputedStyle(one).outlineStyle;
      return `${one.getAttribute("aria-label") || one.id || one.textContent.trim()}${outline === "none" ? " (no outline)" : ""}`;
    });
    if (!name) break;
    reached.push(name);
  }
  return reached;
}

// Presses buttons: "drain NAME" or "checkpoint", with the token typed where it is asked for.
async function pressed(page, press, token) {
  const told = [], rest = await page.evaluate(() => document.querySelectorAll("#rows tr").length);
  for (const wish of press) {
    if (wish === "checkpoint") await page.locator("#checkpoint").click();
    else {
      await page.getByRole("button", { name: `Drain worker ${wish.slice(6)}`, exact: true }).focus();
      await page.keyboard.press("Enter");
      await page.locator("#confirm[open]").waitFor();
      await page.locator("#confirm-yes").click();
    }
    if (await page.evaluate(() => !sessionStorage.getItem("ayni-token"))) {
      await page.locator("#ask-token[open]").waitFor();
      await page.locator("#token-field").fill(token);
      await page.keyboard.press("Enter");
    }
    await page.locator("#told:not([hidden])").waitFor();
    told.push(await page.locator("#told").textContent());
    await page.evaluate(() => { document.querySelector("#told").hidden = true; });
  }
  const drained = told.filter(one => one.includes("leaves after")).length;
  await page.waitForFunction(count => document.querySelectorAll("#rows tr").length <= count, rest - drained);
  return { told };
}

// The worst contrast of any text on the page, and where it is. Runs inside the page.
const WORST = `window.worst = function () {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = color => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const behind = node => { for (let one = node; one; one = one.parentElement) { const color = rgba(getComputedStyle(one).backgroundColor); if (color[3] > 0.99) return color; } return [255, 255, 255, 1]; };
  let found = { ratio: 99, text: "" };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || ["SCRIPT", "STYLE"].includes(node.tagName) || node.closest(":disabled, svg")) continue;
    const a = light(rgba(getComputedStyle(node).color)), b = light(behind(node));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < found.ratio) found = { ratio, text: walker.currentNode.data.trim().slice(0, 60) };
  }
  return found;
}`;

const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox", "--disable-gpu"] });
try {
  const results = {};
  for (const one of JSON.parse(looks)) results[one.name] = await look({
    newContext: async options => { const context = await browser.newContext(options); await context.addInitScript(WORST); return context; },
  }, one);
  console.log(JSON.stringify(results));
} finally {
  await browser.close();
}
