"use strict";
// One box chooses all letters of the page.
document.addEventListener("DOMContentLoaded", () => {
  for (const all of document.querySelectorAll(".mongo-celery input[data-all]")) {
    all.addEventListener("change", () => {
      for (const box of all.form.querySelectorAll(`input[name="${all.dataset.all}"]`)) box.checked = all.checked;
    });
  }
});
