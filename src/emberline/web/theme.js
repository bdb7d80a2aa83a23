/** The colour theme: system, light or dark; a button cycles through them. */

const NAMES = { "light dark": "system", light: "light", dark: "dark" };
const THEMES = Object.keys(NAMES);
const STORAGE_KEY = "emberline.theme";

export function wireTheme(button) {
  const apply = (theme) => {
    document.documentElement.style.colorScheme = theme;
    button.title = button.ariaLabel = `Colour theme: ${NAMES[theme]}`;
    localStorage.setItem(STORAGE_KEY, theme);
  };
  const stored = localStorage.getItem(STORAGE_KEY);
  apply(THEMES.includes(stored) ? stored : THEMES[0]);
  button.onclick = () => apply(THEMES[(THEMES.indexOf(localStorage.getItem(STORAGE_KEY)) + 1) % THEMES.length]);
}
