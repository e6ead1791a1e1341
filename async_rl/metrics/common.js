// Shared by the pages of a run. Data are in scripts that do not run: JSON, or base64 of gzip, which `unpack` opens.
"use strict";
const $ = (id) => document.getElementById(id);
const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key.startsWith("on") ? (element[key] = value) : element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const number = (value, digits = 4) => {
  if (!Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 1e5) return Number(value.toPrecision(digits)).toLocaleString("en");
  return String(+value.toPrecision(digits));
};

async function unpack(id) {
  if (!$(id) && document.readyState === "loading")
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  const coded = $(id).textContent.trim();
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(coded);
  else {
    const raw = atob(coded);
    bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  }
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
const text_of = async (id) => new TextDecoder().decode(await unpack(id));

// `python -m async_rl.view --live` gives <html> the attribute data-live. Then the page asks for itself; if it has changed,
// its scripts with data take the place of the old ones, and `renew` shows them.
async function follow(renew) {
  let tag = document.documentElement.dataset.live;
  if (tag === undefined) return;
  document.querySelector("h1").append(make("span", { id: "live", role: "status" }, "live"));
  for (;;) {
    await new Promise((done) => setTimeout(done, 1500));
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        document.querySelectorAll("script[id]").forEach((old) => old.remove());
        document.body.append(...page.querySelectorAll("script[id]"));
        tag = page.documentElement.dataset.live;
        await renew();
      }
      $("live").textContent = answer.status < 400 ? "live" : "not readable";
    } catch { $("live").textContent = "not connected"; }
  }
}
